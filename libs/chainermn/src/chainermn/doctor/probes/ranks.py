"""What MPI says on each rank of a small job."""

from __future__ import annotations

from typing import Any

THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def examine() -> dict[str, Any] | None:
    """Return, on rank 0: size of the job, thread level, whether MPI adds up float16."""
    from mpi4py import MPI

    levels = [getattr(MPI, f"THREAD_{name}") for name in THREAD_LEVELS]
    world = MPI.COMM_WORLD
    float16 = add_up_float16(world)
    if world.rank:
        return None
    return {
        "size": world.size,
        "thread level": THREAD_LEVELS[levels.index(MPI.Query_thread())],
        "float16": float16,
    }


def add_up_float16(world: Any) -> str:
    """Return ``'right'``, ``'wrong'``, or what MPI says when asked to add up float16."""
    from mpi4py import MPI

    try:
        import numpy as np
    except Exception as error:  # which is not MPI's fault
        return f"not tried ({error})"
    numbers = np.full(3, world.rank + 1, np.float16)
    try:
        world.Allreduce(MPI.IN_PLACE, numbers)
    except Exception as error:
        return f"refused ({error})"
    return "right" if (numbers == sum(range(world.size + 1))).all() else "wrong"
