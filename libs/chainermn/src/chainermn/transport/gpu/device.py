"""Memory, streams and kernels of the GPU that a rank uses, through CuPy."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from chainermn.transport.reducer import Array, Pending


class Gpu(ABC):
    """The operations that chainermn needs, on the current device and its current stream.

    Tests without a GPU replace `CupyGpu` with an emulation, by `use`.
    """

    @abstractmethod
    def holds(self, array: object) -> bool:
        """Tell whether ``array`` is an array in GPU memory."""

    @abstractmethod
    def empty(self, n: int, dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array of shape ``(n,)``."""

    @abstractmethod
    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, with which the GPU can copy asynchronously."""

    @abstractmethod
    def pointer(self, array: Array) -> int:
        """Return the address of the first element of an array in GPU memory."""

    @abstractmethod
    def stream(self) -> int:
        """Return the handle of the current stream, for NCCL."""

    @abstractmethod
    def nccl(self) -> Any:
        """Return CuPy's NCCL module.

        Raises
        ------
        ImportError
            If there is none.
        """

    @abstractmethod
    def device(self) -> str:
        """Return the PCI bus address of the current device, which is unique on its host.

        The number of a device is not: it depends on which devices the process sees.
        """

    @abstractmethod
    def devices(self) -> list[str]:
        """Return the PCI bus addresses of all devices that this process sees.

        Raises
        ------
        RuntimeError
            If CUDA does not answer.
        """

    @abstractmethod
    def upload(self, array: Array) -> Array:
        """Return a copy, in GPU memory, of an array in host memory."""

    @abstractmethod
    def copy_to_host(self, array: Array, host: Array) -> None:
        """Begin to copy ``array`` to ``host``; both are contiguous."""

    @abstractmethod
    def copy_to_gpu(self, host: Array, array: Array) -> None:
        """Begin to copy ``host`` to ``array``; both are contiguous."""

    @abstractmethod
    def new_stream(self) -> Any:
        """Return a new stream of the current device, concurrent with all others."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` and its device current for this thread in the ``with`` block."""

    @abstractmethod
    def record(self) -> Pending:
        """Record an event on the stream: it is complete when all earlier work there is done."""

    @abstractmethod
    def wait_for(self, event: Any) -> None:
        """Let the stream, not the host, wait for an event from `record`."""

    @abstractmethod
    def run(self, source: str, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel of CUDA source code, with `THREADS` threads per block."""


#: Threads per block.
THREADS = 256


class CupyGpu(Gpu):
    """The current device, through CuPy."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    @override
    def holds(self, array: object) -> bool:
        return isinstance(array, self._cupy.ndarray)

    @override
    def empty(self, n: int, dtype: np.dtype[Any]) -> Array:
        return self._cupy.empty(n, dtype)

    @override
    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        memory = self._cupy.cuda.alloc_pinned_memory(n_bytes)
        return np.frombuffer(memory, np.uint8, n_bytes)

    @override
    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    @override
    def stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    @override
    def nccl(self) -> Any:
        from chainermn.transport.gpu.nccl import load_nccl

        return load_nccl()

    @override
    def device(self) -> str:
        return str(self._cupy.cuda.Device().pci_bus_id)

    @override
    def devices(self) -> list[str]:
        count = self._cupy.cuda.runtime.getDeviceCount()
        return [str(self._cupy.cuda.Device(number).pci_bus_id) for number in range(count)]

    @override
    def upload(self, array: Array) -> Array:
        return self._cupy.asarray(array)

    @override
    def copy_to_host(self, array: Any, host: Array) -> None:
        runtime = self._cupy.cuda.runtime
        kind, stream = runtime.memcpyDeviceToHost, self.stream()
        runtime.memcpyAsync(host.ctypes.data, array.data.ptr, host.nbytes, kind, stream)

    @override
    def copy_to_gpu(self, host: Array, array: Any) -> None:
        runtime = self._cupy.cuda.runtime
        kind, stream = runtime.memcpyHostToDevice, self.stream()
        runtime.memcpyAsync(array.data.ptr, host.ctypes.data, host.nbytes, kind, stream)

    @override
    def new_stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    @override
    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # Each thread has its own current device.
        with self._cupy.cuda.Device(stream.device_id), stream:
            yield

    @override
    def record(self) -> Pending:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record()
        return _Event(event)

    @override
    def wait_for(self, event: _Event) -> None:
        self._cupy.cuda.get_current_stream().wait_event(event.event)

    @override
    def run(self, source: str, kernel: str, n_blocks: int, arguments: Sequence[Any]) -> None:
        module = self._module(source, self._cupy.cuda.Device().id)
        module.get_function(kernel)((n_blocks,), (THREADS,), tuple(arguments))

    @functools.lru_cache(8)  # noqa: B019 - there is one object of this class
    def _module(self, source: str, device: int) -> Any:
        return self._cupy.RawModule(code=source, options=("-std=c++17",))


class _Event:
    def __init__(self, event: Any) -> None:
        self.event = event

    def Test(self) -> bool:
        return bool(self.event.done)

    def Wait(self) -> None:
        self.event.synchronize()


_in_use: Gpu | None = None


def use(gpu: Gpu | None) -> None:
    """Replace CuPy with ``gpu``, or restore it if ``gpu`` is None: for tests."""
    global _in_use
    _in_use = gpu


def gpu() -> Gpu | None:
    """Return the GPU, or None while CuPy has not been imported: then no array is on a GPU."""
    if _in_use is None and hasattr(sys.modules.get("cupy"), "ndarray"):
        use(CupyGpu())
    return _in_use


def on_gpu(array: object) -> bool:
    """Tell whether ``array`` is an array in GPU memory."""
    if type(array) is np.ndarray:
        return False
    found = gpu()
    return found is not None and found.holds(array)


def the_gpu() -> Gpu:
    """Return the GPU.

    Raises
    ------
    RuntimeError
        If this process has none.
    """
    found = gpu()
    if found is None:
        raise RuntimeError(
            "an array in GPU memory comes from another rank, but this rank uses no GPU: CuPy is "
            "not installed or cannot be imported here"
        )
    return found
