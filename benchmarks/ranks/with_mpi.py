"""Plain MPI, and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from benchmarks.ranks.orders import Orders, Step


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def allreduce(n_bytes: int) -> Step:
    """Return one in-place ``MPI_Allreduce`` of float32."""
    array = np.full(n_bytes // 4, 0, np.float32)  # sums of zeros stay zero
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)


def memcpy(n_bytes: int) -> Step:
    """Return a copy inside each rank, at the same time on all ranks."""
    source, into = (np.zeros(n_bytes, np.uint8) for _ in range(2))
    source[...] = 1
    return lambda: np.copyto(into, source)


PREPARE: dict[str, Callable[..., Step]] = {"allreduce": allreduce, "memcpy": memcpy}
