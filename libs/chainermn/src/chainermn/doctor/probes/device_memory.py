"""Whether MPI takes device memory. Where it does not, this crashes or gives wrong numbers."""

from __future__ import annotations


def examine() -> str | None:
    """Return, on rank 0, ``'right'`` or ``'wrong'``."""
    import cupy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    numbers = cupy.full(100_000, world.rank + 1, "float32")
    cupy.cuda.get_current_stream().synchronize()
    world.Allreduce(MPI.IN_PLACE, numbers)
    mine = bool((numbers == sum(range(world.size + 1))).all())
    right = world.allreduce(mine, MPI.LAND)
    return ("right" if right else "wrong") if world.rank == 0 else None
