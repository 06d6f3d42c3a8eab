"""Create a communicator, exchange gradients, and measure time and memory: once per job."""

from __future__ import annotations

import time
from typing import Any

import chainer
import numpy as np
import psutil

import chainermn
from benchmarks.ranks.orders import Orders


def run(orders: Orders) -> None:
    """Answer the first order when everything is imported, and measure at the second."""
    waiting = iter(orders)
    next(waiting)
    orders.answer({})
    orders.answer(measure(**next(waiting)["options"]))
    next(waiting, None)  # the job ends on request, not while others are measured


def measure(n_bytes: int, exchanges: int) -> dict[str, Any]:
    """Return seconds, and the bytes that this rank and its helpers hold at the end."""
    start = time.perf_counter()
    comm = chainermn.create_communicator("naive")
    seconds = {"create": time.perf_counter() - start}
    model = chainer.Chain()
    with model.init_scope():
        model.weight = chainer.Parameter(np.zeros(n_bytes // 4, np.float32))
    model.weight.grad = np.zeros_like(model.weight.array)  # sums of zeros stay zero
    for name, repeat in (("first", min(exchanges, 1)), ("exchange", exchanges)):
        comm.mpi_comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            comm.multi_node_mean_grad(model)
        seconds[name] = (time.perf_counter() - start) / max(repeat, 1)
    rank = psutil.Process()
    processes = [rank, *rank.children(recursive=True)]
    return {**seconds, "memory": sum(process.memory_info().rss for process in processes)}
