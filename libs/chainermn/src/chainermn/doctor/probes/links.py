"""Latency and bandwidth between each pair of ranks, one pair after the other."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

SMALL_BYTES, LARGE_BYTES = 8, 4 * 2**20
_SECONDS = 0.5


def examine() -> list[dict[str, Any]] | None:
    """Return, on rank 0, for each pair: hosts, seconds one way, bytes per second."""
    import socket

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    names = world.allgather(socket.gethostname())
    measured = []
    for pair in itertools.combinations(range(world.size), 2):
        small, large = (ping_pong(world, pair, size) for size in (SMALL_BYTES, LARGE_BYTES))
        hosts = [names[rank] for rank in pair]
        measured.append({"hosts": hosts, "latency": small, "bandwidth": LARGE_BYTES / large})
        world.Barrier()
    return measured if world.rank == 0 else None


def ping_pong(world: Any, pair: tuple[int, int], size: int) -> float:
    """Return the median time in which a message of ``size`` bytes goes one way; on all ranks.

    Half of a round trip, as the OSU micro-benchmarks take it.
    """
    import numpy as np

    first, second = pair
    message, seconds = np.zeros(size, np.uint8), [0.0]
    if world.rank == first:
        seconds.clear()
        end = time.perf_counter() + _SECONDS
        while len(seconds) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            world.Send(message, second, tag=1)
            world.Recv(message, second)
            seconds.append((time.perf_counter() - start) / 2)
        world.Send(message, second, tag=0)
    elif world.rank == second:
        from mpi4py import MPI

        status = MPI.Status()
        while True:
            world.Recv(message, first, status=status)
            if status.Get_tag() == 0:
                break
            world.Send(message, first)
    return float(world.bcast(statistics.median(seconds), first))
