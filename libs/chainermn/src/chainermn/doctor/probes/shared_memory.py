"""Whether ranks of a host can share memory."""

from __future__ import annotations

from typing import Any

BYTES_A_RANK = 8 * 2**20


def examine() -> str | None:
    """Return, on rank 0, ``'right'`` if each rank reads what its neighbour has written."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node: Any = world.Split_type(MPI.COMM_TYPE_SHARED)
    window: Any = MPI.Win.Allocate_shared(BYTES_A_RANK, 1, comm=node)
    neighbour = (node.rank + 1) % node.size
    mine, theirs = (memoryview(window.Shared_query(rank)[0]) for rank in (node.rank, neighbour))
    window.Fence()
    mine[:] = content(node.rank)  # each page of it, since memory that is not there shows only then
    window.Fence()
    right = world.allreduce(theirs == content(neighbour), MPI.LAND)
    window.Fence()
    del mine, theirs
    window.Free()
    return ("right" if right else "wrong") if world.rank == 0 else None


def content(rank: int) -> bytes:
    """Return what a rank writes."""
    return bytes([(rank + 1) % 256]) * BYTES_A_RANK
