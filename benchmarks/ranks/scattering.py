"""Scatter a data set once, and measure time and memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from chainer.datasets import TupleDataset

import chainermn
from benchmarks.ranks.orders import Orders

# A virtual machine may return memory that was free for a second or two to its host. Getting it
# back can take three times as long as the scattering. So half a gigabyte is allocated first, in
# large pages, which NumPy requests.
TAKE_MEMORY = "import numpy; numpy.ones(1 << 26)"


def run(orders: Orders) -> None:
    for order in orders:
        orders.answer(scatter(**order["options"]))


def scatter(data: str, length: int) -> dict[str, Any]:
    """Scatter a data set of rank 0, and measure memory, which only the data set changes."""
    comm = chainermn.create_communicator("naive")
    # The first messages allocate buffers, which are not to be counted.
    chainermn.scatter_dataset(list(range(100)) if comm.rank == 0 else None, comm)
    whole = MAKERS[data](length) if comm.rank == 0 else None
    gc.collect()
    subprocess.run([sys.executable, "-c", TAKE_MEMORY], check=True)
    process = psutil.Process()
    comm.mpi_comm.Barrier()
    before = process.memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: man 5 proc
    start = time.perf_counter()
    part = chainermn.scatter_dataset(whole, comm, shuffle=True, seed=0)
    seconds = time.perf_counter() - start
    assert len(part) == -(-length // comm.size)
    after = process.memory_info().rss
    return {"seconds": seconds, "peak": peak() - before, "kept": after - before}


def peak() -> int:
    """Return the peak memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024


def arrays(length: int) -> TupleDataset:
    return TupleDataset(np.ones((length, 784), np.float32), np.arange(length, dtype=np.int32))


def pairs(length: int) -> list[tuple[str, int]]:
    return [(f"n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG", i % 1000) for i in range(length)]


MAKERS = {"arrays": arrays, "pairs": pairs}
