"""Whether the ranks of a host can share memory, as the library does it."""

from __future__ import annotations


def examine() -> str | None:
    """Return, on rank 0, the first reason why a rank cannot; empty if all can."""
    from mpi4py import MPI

    from chainermn.transport.host.shared_memory import share_memory

    memory = share_memory(MPI.COMM_WORLD)
    reasons = MPI.COMM_WORLD.gather(memory if isinstance(memory, str) else "")
    return None if reasons is None else next(filter(None, reasons), "")
