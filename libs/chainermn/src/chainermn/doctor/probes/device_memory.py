"""Whether MPI adds up GPU memory, as the library lets it where CHAINERMN_CUDA_AWARE=1 is set."""

from __future__ import annotations


def examine() -> bool | None:
    """Return, on rank 0, whether the sums are right on all ranks. An MPI that cannot may crash."""
    import cupy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    numbers = cupy.full(100_000, world.rank + 1, "float32")
    cupy.cuda.get_current_stream().synchronize()
    world.Iallreduce(MPI.IN_PLACE, numbers).Wait()
    right = bool((numbers == sum(range(world.size + 1))).all())
    return world.reduce(right, MPI.LAND)
