"""What stands in for a GPU where there is none: host memory. For NCCL, see `stand_in_nccl`.

Its arrays are NumPy's, of a class of their own, so that chainermn takes them for CuPy's. Pointers
are real ones. What the default stream is given is done at once, as NumPy does; what other streams
are given is done as late as possible: when something waits for it. But NumPy's own operations are
always done at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI
from stand_in_nccl import StandInNccl, at

from chainermn.gradients.batched_copy import ALIGNMENT
from chainermn.transport.gpu.device import Gpu

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class GpuArray(np.ndarray):
    """An array in what stands in for GPU memory.

    Counts how often the host looks at a value, for which it would wait until a GPU is idle.
    """

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        """Return an array in GPU memory for a single element too, as CuPy does."""
        found = super().__getitem__(key)
        return found if isinstance(found, np.ndarray) else np.asarray(found).view(GpuArray)

    def _look(name: str) -> Any:
        def look(self: GpuArray, *args: Any) -> Any:
            GpuArray.looks += 1
            return getattr(np.ndarray, name)(self, *args)

        return look

    __bool__, __float__, __int__ = map(_look, ("__bool__", "__float__", "__int__"))
    item, tolist = map(_look, ("item", "tolist"))


class StandInGpu(Gpu):
    """Counts what it is asked to do: `log` has the names of copies, kernels and calls of NCCL."""

    def __init__(self, device: str | None = None, visible: int = 8) -> None:
        self.log: list[str] = []
        self.waits = 0
        self.streams: list[StandInStream] = []
        self._current = threading.local()
        self._device = device or f"0000:{WORLD.rank:02}:00.0"
        self._visible = visible
        self.library = StandInNccl(self)

    @staticmethod
    def to_gpu(array: Any) -> np.ndarray:
        return np.array(array, order="C").view(GpuArray)

    def holds(self, array: object) -> bool:
        return isinstance(array, GpuArray)

    def empty(self, n: int, dtype: np.dtype) -> np.ndarray:
        return np.full(n * np.dtype(dtype).itemsize, 0xAB, np.uint8).view(dtype).view(GpuArray)

    def pinned(self, n_bytes: int) -> np.ndarray:
        return np.full(n_bytes, 0xCD, np.uint8)

    def upload(self, array: np.ndarray) -> np.ndarray:
        self.log.append("upload")
        return self.to_gpu(array)

    def pointer(self, array: np.ndarray) -> int:
        assert isinstance(array, GpuArray)
        assert array.flags.c_contiguous
        return array.ctypes.data

    def stream(self) -> int:
        stream = self.current()
        return 7 if stream is None else 8 + self.streams.index(stream)

    def new_stream(self) -> StandInStream:
        self.streams.append(StandInStream())
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def current(self) -> StandInStream | None:
        """Return the current stream of this thread; None: the default one."""
        return getattr(self._current, "stream", None)

    def begin(self, name: str, call: Callable[[], Any]) -> None:
        """Do it on the current stream."""
        stream = self.current()

        def do() -> None:
            self.log.append(name)
            call()

        if stream is None:
            do()
        else:
            stream.work.append(do)

    def nccl(self) -> Any:
        return self.library

    def device(self) -> str:
        return self._device

    def devices(self) -> list[str]:
        return [f"0000:{number:02}:00.0" for number in range(self._visible)]

    def copy_to_host(self, array: np.ndarray, host: np.ndarray) -> None:
        assert isinstance(array, GpuArray)
        assert not isinstance(host, GpuArray)
        self.begin("copy_to_host", lambda: np.copyto(host, array))

    def copy_to_gpu(self, host: np.ndarray, array: np.ndarray) -> None:
        assert isinstance(array, GpuArray)
        assert not isinstance(host, GpuArray)
        self.begin("copy_to_gpu", lambda: np.copyto(array, host))

    def record(self) -> Any:
        stream = self.current()
        event = StandInEvent(self, stream)
        if stream is not None:
            stream.work.append(event)
        return event

    def wait_for(self, event: Any) -> None:
        assert isinstance(event, StandInEvent)
        stream = self.current()
        if stream is None:
            event.bring()
        elif event.stream is not stream:
            stream.work.append(event.bring)

    def run(self, source: str, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        self.begin(kernel, lambda: self._copy(kernel, n_blocks, arguments))

    def _copy(self, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        """Do what the kernels in batched_copy.cu do, block by block."""
        what, *names = kernel.split("_")
        dtype, wire_dtype = (np.dtype(getattr(ml_dtypes, name, name)) for name in names)
        pieces, pointers, buffer = arguments[:3]
        assert all(isinstance(table, GpuArray) for table in (pieces, pointers))
        assert len(pieces) == n_blocks
        for index, start, n, position in pieces.view(np.ndarray).tolist():
            array = at(int(pointers[index]) + start * dtype.itemsize, n, dtype)
            address = int(buffer) + position * wire_dtype.itemsize
            part = at(address, n, wire_dtype)
            wide = np.result_type(np.float32, *(d for d in (dtype, wire_dtype) if d != BFLOAT16))
            if what == "gather":
                part[:] = array.astype(wide)
                at(address, n + -n % ALIGNMENT, wire_dtype)[n:] = 0
            else:
                array[:] = part.astype(wide) / wide.type(arguments[3])


class StandInStream:
    """Work for a thread, which does it when it is asked to come to an event."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], Any]] = deque()
        self.error: Exception | None = None
        self._asked: queue.SimpleQueue[StandInEvent] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def come_to(self, event: StandInEvent) -> None:
        self._asked.put(event)

    def _run(self) -> None:
        while True:
            event = self._asked.get()
            while not event.has_come.is_set():
                try:
                    self.work.popleft()()
                except Exception as error:
                    self.error = error
                    event.has_come.set()


class StandInEvent:
    def __init__(self, gpu: StandInGpu, stream: StandInStream | None) -> None:
        self.stream = stream
        self.has_come = threading.Event()
        self._gpu = gpu
        if stream is None:
            self.has_come.set()

    def __call__(self) -> None:
        self.has_come.set()

    def bring(self) -> None:
        """Wait until the stream has done all that comes before the event."""
        self.Test()
        self.has_come.wait()
        self._check()

    def Test(self) -> bool:
        if self.stream is not None and not self.has_come.is_set():
            self.stream.come_to(self)
        self._check()
        return self.has_come.is_set()

    def _check(self) -> None:
        if self.stream is not None and self.stream.error is not None:
            raise self.stream.error

    def Wait(self) -> None:
        self.bring()
        self._gpu.waits += 1
