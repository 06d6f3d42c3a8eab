"""Use the memory, streams and kernels of a rank's GPU, through CuPy."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chainermn.transport.gpu.compilation import one_rank_at_a_time
from chainermn.transport.host.mpi import load_mpi
from chainermn.transport.reducer import Array, Dtype, Pending
from chainermn.transport.topology import host_name

#: Threads per block of a kernel.
THREADS = 256

# cudaSuccess and cudaErrorNotReady, which CuPy does not name.
_SUCCESS, _NOT_READY = 0, 600

_of_thread = threading.local()


@contextmanager
def recordable() -> Iterator[None]:
    """Let a CUDA graph record what this thread enqueues in the ``with`` block.

    The graph reads host memory whenever it is launched. The host must not wait for the GPU.
    """
    before, _of_thread.is_recordable = is_recordable(), True
    try:
        yield
    finally:
        _of_thread.is_recordable = before


def is_recordable() -> bool:
    """Tell whether a CUDA graph may record what this thread enqueues."""
    return getattr(_of_thread, "is_recordable", False)


def check_may_wait() -> None:
    """Raise a RuntimeError if this thread must not wait for the GPU; see `recordable`."""
    if is_recordable():
        raise RuntimeError(
            f"rank {load_mpi().COMM_WORLD.rank}: the host would wait for the GPU in a step that "
            "becomes a CUDA graph. Arrays in GPU memory must be exchanged by NCCL alone: use the "
            "communicator 'pure_nccl', and leave out overlap=True if layers exchange, too"
        )


class Gpu:
    """The operations that chainermn needs, on the current device and its current stream.

    Tests without a GPU replace it with an emulation; see `use`.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        # Host memory that recorded steps read.
        self._kept: list[Array] = []

    def holds(self, array: object) -> bool:
        """Tell whether ``array`` is an array in GPU memory."""
        return isinstance(array, self._cupy.ndarray)

    def empty(self, n: int, dtype: Dtype) -> Array:
        """Return an uninitialized array of shape ``(n,)``."""
        return self._cupy.empty(n, dtype)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, which allows asynchronous copies."""
        memory = self._cupy.cuda.alloc_pinned_memory(n_bytes)
        return np.frombuffer(memory, np.uint8, n_bytes)

    def pointer(self, array: Any) -> int:
        """Return the address of the first element of an array in GPU memory."""
        return int(array.data.ptr)

    def stream(self) -> int:
        """Return the handle of the current stream, for NCCL."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    @staticmethod
    def nccl() -> Any:
        """Return CuPy's NCCL module, or raise an ImportError if it or NCCL is missing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below says the same as CuPy's warning
            from cupy.cuda import nccl

        if not getattr(nccl, "available", True):
            raise ImportError(
                "CuPy finds no NCCL library; install it, for example with: "
                "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12)"
            )
        return nccl

    def device(self) -> str:
        """Return the PCI bus address of the current device, which is unique on its host.

        Device numbers are not unique: they depend on which devices the process sees.
        """
        return str(self._cupy.cuda.Device().pci_bus_id)

    def devices(self) -> list[str]:
        """Return the PCI bus addresses of all devices that this process sees.

        Raises a RuntimeError if CUDA does not answer.
        """
        count = self._cupy.cuda.runtime.getDeviceCount()
        return [str(self._cupy.cuda.Device(number).pci_bus_id) for number in range(count)]

    def upload(self, array: Array) -> Array:
        """Copy an array in host memory to GPU memory, without waiting on the host.

        CuPy copies from pinned memory, which it keeps until the stream has made the copy. What a
        CUDA graph may record is kept for as long as this process lives.
        """
        if not is_recordable():
            return self._cupy.asarray(array)
        pinned = self.pinned(array.nbytes).view(array.dtype)
        pinned[...] = array.reshape(-1)
        self._kept.append(pinned)
        found = self.empty(array.size, array.dtype)
        self.copy_to_gpu(pinned, found)
        return found.reshape(array.shape)

    def copy_to_host(self, array: Any, host: Array) -> None:
        """Start copying ``array`` to ``host``; both are contiguous."""
        runtime = self._cupy.cuda.runtime
        kind, stream = runtime.memcpyDeviceToHost, self.stream()
        runtime.memcpyAsync(host.ctypes.data, array.data.ptr, host.nbytes, kind, stream)

    def copy_to_gpu(self, host: Array, array: Any) -> None:
        """Start copying ``host`` to ``array``; both are contiguous."""
        runtime = self._cupy.cuda.runtime
        kind, stream = runtime.memcpyHostToDevice, self.stream()
        runtime.memcpyAsync(array.data.ptr, host.ctypes.data, host.nbytes, kind, stream)

    def new_stream(self) -> Any:
        """Return a new stream of the current device, concurrent with all others."""
        return self._cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` and its device current for this thread in the ``with`` block."""
        # Each thread has its own current device.
        with self._cupy.cuda.Device(stream.device_id), stream:
            yield

    def record(self) -> Pending:
        """Record an event on the stream, which completes when all earlier work there is done."""
        return Event(self._recorded(disable_timing=True), self._cupy.cuda.runtime)

    def timed_event(self) -> TimedEvent:
        """Record an event on the stream that also stores the time at which it completes."""
        cuda = self._cupy.cuda
        return TimedEvent(self._recorded(), cuda.runtime, cuda.get_elapsed_time)

    def _recorded(self, **settings: bool) -> Any:
        # With block=True, a waiting thread sleeps. By default it would keep a core busy, which
        # data loaders and MPI's other threads need.
        event = self._cupy.cuda.Event(block=True, **settings)
        event.record()
        return event

    def wait_for(self, event: Any) -> None:
        """Let the stream, not the host, wait for an event from `record`."""
        self._cupy.cuda.get_current_stream().wait_event(event.event)

    def run(self, source: str, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel from CUDA source code, with `THREADS` threads per block."""
        function = self._compiled(source, kernel, self._cupy.cuda.Device().id)
        function((n_blocks,), (THREADS,), tuple(arguments))

    @functools.lru_cache(64)  # noqa: B019 - there is one object of this class
    def _compiled(self, source: str, kernel: str, device: int) -> Any:
        with one_rank_at_a_time():
            module = self._cupy.RawModule(code=source, options=("-std=c++17",))
            return module.get_function(kernel)


class Event:
    """An event on a stream of the GPU: a `Pending`.

    Raises
    ------
    RuntimeError
        From both methods, if earlier work on the GPU has failed, or if a CUDA graph may record
        the step.
    """

    def __init__(self, event: Any, runtime: Any) -> None:
        self.event = event
        self._runtime = runtime

    def Test(self) -> bool:
        """Tell whether the stream has reached the event."""
        check_may_wait()
        # After an error, CuPy's `Event.done` would stay false forever.
        status = self._runtime.eventQuery(self.event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise _failed(self._runtime.CUDARuntimeError(status))
        return bool(status == _SUCCESS)

    def Wait(self) -> None:
        """Wait until the stream has reached the event."""
        check_may_wait()
        try:
            self.event.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise _failed(error) from error


def _failed(error: Exception) -> RuntimeError:
    # CUDA reports a failure in whichever call comes next, on any stream.
    return RuntimeError(
        f"earlier work on the GPU of rank {load_mpi().COMM_WORLD.rank}, on {host_name()}, has "
        f"failed: {error}. To find the kernel that failed, run with CUDA_LAUNCH_BLOCKING=1 or "
        "under compute-sanitizer. If only this host fails, look for Xid errors in dmesg: the GPU "
        "itself may be faulty"
    )


class TimedEvent(Event):
    """An event that stores the time at which it completes."""

    def __init__(
        self, event: Any, runtime: Any, milliseconds_between: Callable[[Any, Any], float]
    ) -> None:
        super().__init__(event, runtime)
        self._milliseconds_between = milliseconds_between

    def nanoseconds_since(self, earlier: TimedEvent) -> float:
        """Return the time from another event to this one; both must be complete."""
        return 1e6 * self._milliseconds_between(earlier.event, self.event)


_in_use: Gpu | None = None


def use(gpu: Gpu | None) -> None:
    """Replace CuPy with ``gpu``, or restore it if ``gpu`` is None. For tests."""
    global _in_use
    _in_use = gpu


def gpu() -> Gpu | None:
    """Return the GPU, or None while CuPy has not been imported: then no array is on a GPU."""
    if _in_use is None and hasattr(sys.modules.get("cupy"), "ndarray"):
        use(Gpu())
    return _in_use


def on_gpu(array: object) -> bool:
    """Tell whether ``array`` is an array in GPU memory."""
    if type(array) is np.ndarray:
        return False
    found = gpu()
    return found is not None and found.holds(array)


def the_gpu() -> Gpu:
    """Return the GPU, or raise a RuntimeError if this process has none."""
    found = gpu()
    if found is None:
        raise RuntimeError(
            "another rank sends an array in GPU memory, but this rank has no GPU: CuPy is not "
            "installed or cannot be imported here"
        )
    return found
