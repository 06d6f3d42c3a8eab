"""What MPI says on each rank of a small job."""

from __future__ import annotations

from typing import Any

THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def examine() -> dict[str, Any] | None:
    """Return, on rank 0: the size of the job and the thread level."""
    from mpi4py import MPI

    levels = [getattr(MPI, f"THREAD_{name}") for name in THREAD_LEVELS]
    world = MPI.COMM_WORLD
    if world.rank:
        return None
    return {"size": world.size, "thread level": THREAD_LEVELS[levels.index(MPI.Query_thread())]}
