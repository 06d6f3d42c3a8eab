"""A stand-in for a GPU, made of host memory. For NCCL, see `stand_in_nccl`.

Its arrays are NumPy arrays with a class of their own, so that chainermn takes them for CuPy's.
Pointers are real. Work on the default stream is done at once, as in NumPy. Work on other streams
is done as late as possible: when something waits for it. NumPy's own operations, however, are
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
from stand_in_memory import StreamMemory
from stand_in_nccl import StandInNccl, at

from chainermn.gradients.batched_copy import ALIGNMENT
from chainermn.transport.gpu import device
from chainermn.transport.gpu.device import Gpu

WORLD = MPI.COMM_WORLD
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class GpuArray(np.ndarray):
    """An array in the stand-in for GPU memory.

    Counts how often the host looks at a value: each time, it would wait for a GPU to be idle.
    """

    looks = 0

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **kwds: Any
    ) -> Any:
        gpu = _uses(*inputs, *out)
        if out:
            if any(type(each) is np.ndarray and each.ndim == 0 for each in inputs):
                # CuPy takes NumPy's scalars, but none of its arrays. Only those without axes are
                # refused here: CuPy would have some of the others in GPU memory.
                raise TypeError(f"Unsupported type {np.ndarray}")
            kwds["out"] = tuple(map(_plain, out))
        kwds = {name: _plain(value) for name, value in kwds.items()}
        found = getattr(ufunc, method)(*map(_plain, inputs), **kwds)
        if out or found is None:
            return out[0] if len(out) == 1 else out or None
        return tuple(map(gpu.to_gpu, found)) if isinstance(found, tuple) else gpu.to_gpu(found)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in (np.zeros_like, np.ones_like):
            return _uses(*args).to_gpu(func(*map(_plain, args), **kwargs))
        return super().__array_function__(func, types, args, kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        _uses(self, value)
        super().__setitem__(key, value)

    def copy(self, order: Any = "C") -> GpuArray:
        return _uses(self).to_gpu(np.array(_plain(self), order=order))

    def dot(self, other: Any) -> GpuArray:
        return _uses(self, other).to_gpu(_plain(self).dot(_plain(other)))

    def astype(self, *args: Any, **kwds: Any) -> GpuArray:
        found = _plain(self).astype(*args, **kwds)
        shares = np.may_share_memory(found, self)
        return found.view(GpuArray) if shares else _uses(self).to_gpu(found)

    def __getitem__(self, key: Any) -> Any:
        """Return an array in GPU memory even for a single element, as CuPy does."""
        found = super().__getitem__(key)
        return found if isinstance(found, np.ndarray) else np.asarray(found).view(GpuArray)

    def _look(name: str) -> Any:
        def look(self: GpuArray, *args: Any) -> Any:
            GpuArray.looks += 1
            return getattr(np.ndarray, name)(self, *args)

        return look

    __bool__, __float__, __int__ = map(_look, ("__bool__", "__float__", "__int__"))
    item, tolist = map(_look, ("item", "tolist"))


def _uses(*arrays: Any) -> StandInGpu:
    """Note that the current stream uses the arrays that are in GPU memory; return the GPU."""
    gpu = device.gpu()
    assert isinstance(gpu, StandInGpu)
    in_gpu_memory = [array for array in arrays if isinstance(array, GpuArray)]
    gpu.memory.use(gpu.current(), *(array.ctypes.data for array in in_gpu_memory))
    return gpu


def _plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, GpuArray) else array


class StandInGpu(Gpu):
    """A GPU that records what it is asked to do.

    ``log`` names copies, kernels and NCCL calls; ``waits`` counts how often the main thread has
    waited. The process sees ``visible`` GPUs; the current one has the PCI bus ``address``.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits = 0
        self.streams: list[StandInStream] = []
        self._current = threading.local()
        self.address = f"0000:{WORLD.rank:02}:00.0"
        self.visible = 8
        self.library = StandInNccl(self)
        self.memory = StreamMemory()

    def to_gpu(self, array: Any) -> np.ndarray:
        array = np.asarray(_plain(array))
        found = self.memory.empty(self.current(), array.size, array.dtype)
        found = found.reshape(array.shape)
        found[...] = array
        return found.view(GpuArray)

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(_plain(array))

    def holds(self, array: object) -> bool:
        return isinstance(array, GpuArray)

    def empty(self, n: int, dtype: np.dtype) -> np.ndarray:
        found = self.memory.empty(self.current(), n, dtype)
        found.view(np.uint8)[...] = 0xAB
        return found.view(GpuArray)

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
        """Return this thread's current stream, or None for the default stream."""
        return getattr(self._current, "stream", None)

    def begin(self, name: str, call: Callable[[], Any], *addresses: int) -> None:
        """Give ``call`` to the current stream; it uses the GPU memory at these addresses."""
        stream = self.current()
        self.memory.use(stream, *addresses)

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
        return self.address

    def devices(self) -> list[str]:
        return [f"0000:{number:02}:00.0" for number in range(self.visible)]

    def copy_to_host(self, array: np.ndarray, host: np.ndarray) -> None:
        assert isinstance(array, GpuArray)
        assert not isinstance(host, GpuArray)
        address = array.ctypes.data
        self.begin("copy_to_host", lambda: np.copyto(host, array.view(np.ndarray)), address)

    def copy_to_gpu(self, host: np.ndarray, array: np.ndarray) -> None:
        assert isinstance(array, GpuArray)
        assert not isinstance(host, GpuArray)
        address = array.ctypes.data
        self.begin("copy_to_gpu", lambda: np.copyto(array.view(np.ndarray), host), address)

    def record(self) -> Any:
        stream = self.current()
        event = StandInEvent(self, stream)
        if stream is not None:
            stream.work.append(event)
        return event

    def wait_for(self, event: Any) -> None:
        assert isinstance(event, StandInEvent)
        stream = self.current()
        self.memory.wait(stream, event.clock)
        if stream is None:
            event.bring()
        elif event.stream is not stream:
            stream.work.append(event.bring)

    def run(self, source: str, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        pieces, pointers, buffer = arguments[:3]
        addresses = pieces.ctypes.data, pointers.ctypes.data, int(buffer)
        # The pointers can be read already, since uploads are done at once.
        addresses += tuple(_plain(pointers).tolist())
        self.begin(kernel, lambda: self._copy(kernel, n_blocks, arguments), *addresses)

    def _copy(self, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        """Do what the kernels in batched_copy.cu do, block by block."""
        what, *names = kernel.split("_")
        dtype, wire_dtype = (np.dtype(getattr(ml_dtypes, name, name)) for name in names)
        buffer = arguments[2]
        assert all(isinstance(table, GpuArray) for table in arguments[:2])
        pieces, pointers = map(_plain, arguments[:2])
        assert len(pieces) == n_blocks
        for index, start, n, position in pieces.tolist():
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
    """Work that a thread does once it is asked to reach an event."""

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
        self.clock = gpu.memory.now(stream)
        self.has_come = threading.Event()
        self._gpu = gpu
        if stream is None:
            self.has_come.set()

    def __call__(self) -> None:
        self.has_come.set()

    def bring(self) -> None:
        """Wait until the stream has done everything before the event."""
        self._test()
        self.has_come.wait()
        self._check()

    def Test(self) -> bool:
        device.check_may_wait()
        return self._test()

    def _test(self) -> bool:
        if self.stream is not None and not self.has_come.is_set():
            self.stream.come_to(self)
        self._check()
        if self.has_come.is_set():
            self._gpu.memory.host_waited(self.clock)
        return self.has_come.is_set()

    def _check(self) -> None:
        if self.stream is not None and self.stream.error is not None:
            raise self.stream.error

    def Wait(self) -> None:
        device.check_may_wait()
        self.bring()
        self._gpu.memory.host_waited(self.clock)
        self._gpu.waits += threading.current_thread() is threading.main_thread()
