"""Buckets of gradients that are exchanged while backward still computes others."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from chainermn.gradients.batched_copy import BatchedCopy, Layout
from chainermn.gradients.gpu_buckets import gpu_zeros, padded_length
from chainermn.gradients.overlap.progress import Exchange

if TYPE_CHECKING:
    import chainer

    from chainermn.transport.gpu.device import Gpu
    from chainermn.transport.reducer import Pending

Array: TypeAlias = NDArray[Any]


class WireDtypes(NamedTuple):
    """To what gradients are rounded before they travel; None: they are not.

    Attributes
    ----------
    host, gpu : dtype or None
        Those in host memory, and those in GPU memory.
    """

    host: np.dtype[Any] | None
    gpu: np.dtype[Any] | None


#: On a lane, replaces a buffer in host memory, rounded to a dtype on the wire, by its mean over
#: the ranks; yields whenever it waits for them.
MeanInSteps: TypeAlias = Callable[[int, Array, np.dtype[Any] | None], Iterator[None]]

#: Gives the current stream the work of replacing a buffer in GPU memory by its sum over the
#: ranks; yields whenever the host has to wait for them.
SumInSteps: TypeAlias = Callable[[Array], Iterator[None]]


class Bucket(ABC):
    """Memory for some gradients of one dtype, one behind the other.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
    """

    def __init__(self, parameters: Sequence[chainer.Parameter]) -> None:
        self.parameters = parameters

    @abstractmethod
    def exchange(self, gradients: Sequence[Array | None], wire: WireDtypes) -> Exchange:
        """Return what gathers these gradients, None for zeros, and averages them.

        Called where they are computed, whereas what it returns may run in another thread.
        """

    @abstractmethod
    def arrive(self) -> None:
        """Let what is computed next follow the exchange, which is over for the host."""

    @abstractmethod
    def hand_out(self) -> None:
        """Make the means the gradients of the parameters, which have arrays of their own."""


class HostBucket(Bucket):
    """For gradients in host memory."""

    def __init__(
        self, parameters: Sequence[chainer.Parameter], mean_in_steps: MeanInSteps
    ) -> None:
        super().__init__(parameters)
        self._mean_in_steps = mean_in_steps
        sizes = [parameter.size for parameter in parameters]
        self._buffer = np.empty(sum(sizes), parameters[0].dtype)
        parts = np.split(self._buffer, np.cumsum(sizes)[:-1])
        self._parts = [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]

    @override
    def exchange(self, gradients: Sequence[Array | None], wire: WireDtypes) -> Exchange:
        return functools.partial(self._run, gradients, wire.host)

    @override
    def arrive(self) -> None:
        pass

    @override
    def hand_out(self) -> None:
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            parameter.grad[...] = part

    def _run(
        self, gradients: Sequence[Array | None], wire_dtype: np.dtype[Any] | None, lane: int
    ) -> Iterator[None]:
        for part, gradient in zip(self._parts, gradients, strict=True):
            part[...] = 0 if gradient is None else gradient
        yield from self._mean_in_steps(lane, self._buffer, wire_dtype)


class GpuBucket(Bucket):
    """For gradients in GPU memory, which are exchanged on a stream beside that of backward.

    The streams wait for each other; the host waits for neither.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
    stream : SideStream
        The same one for all buckets.
    size : int
        Number of ranks.
    sum_in_steps : callable
    """

    def __init__(
        self,
        parameters: Sequence[chainer.Parameter],
        stream: SideStream,
        size: int,
        sum_in_steps: SumInSteps,
    ) -> None:
        super().__init__(parameters)
        self._gpu = stream.gpu
        self._stream = stream
        self._size = size
        self._sum_in_steps = sum_in_steps
        self._layout = Layout([p.size for p in parameters], [p.dtype for p in parameters])
        self._buffer, self._copy = self._allocate(parameters[0].dtype)
        self._gathered: list[Array] = []
        self._over: Pending

    @override
    def exchange(self, gradients: Sequence[Array | None], wire: WireDtypes) -> Exchange:
        dtype = wire.gpu or self.parameters[0].dtype
        if self._buffer.dtype != dtype:
            self._buffer, self._copy = self._allocate(dtype)
        pairs = zip(gradients, self.parameters, strict=True)
        self._gathered = [self._contiguous(gradient, parameter) for gradient, parameter in pairs]
        return functools.partial(self._run, self._gpu.record())

    @override
    def arrive(self) -> None:
        self._gpu.wait_for(self._over)
        # What is computed next may have the memory of what has been gathered.
        self._gathered = []

    @override
    def hand_out(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        self._copy.scatter(self._buffer, gradients, self._size)

    def _allocate(self, dtype: np.dtype[Any]) -> tuple[Array, BatchedCopy]:
        length = padded_length(self._layout.size, self._size)
        buffer = gpu_zeros(self._gpu, length, dtype)
        return buffer, BatchedCopy(self._gpu, self._layout, dtype)

    def _contiguous(self, gradient: Array | None, parameter: chainer.Parameter) -> Array:
        if gradient is None:
            return gpu_zeros(self._gpu, parameter.size, parameter.dtype)
        return gradient if gradient.flags.c_contiguous else gradient.copy(order="C")

    def _run(self, computed: Pending, lane: int) -> Iterator[None]:
        return self._stream.do(self._steps(computed))

    def _steps(self, computed: Pending) -> Iterator[None]:
        self._gpu.wait_for(computed)
        self._copy.gather(self._gathered, self._buffer)
        yield from self._sum_in_steps(self._buffer)
        self._over = self._gpu.record()


class SideStream:
    """A stream that is given one exchange after another, beside the stream of backward.

    If the steps of two could alternate, they would on each rank in another order. Then the
    stream of one rank comes to a collective that others have behind another one, and they all
    wait for ever.

    Attributes
    ----------
    gpu : Gpu
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._stream = gpu.new_stream()
        self._is_taken = False

    def do(self, exchange: Iterator[None]) -> Iterator[None]:
        """Do each of the steps on the stream, and what is between them on another."""
        while self._is_taken:
            yield
        self._is_taken = True
        try:
            for _ in self._resumed(exchange):
                yield
        finally:
            self._is_taken = False

    def _resumed(self, exchange: Iterator[None]) -> Iterator[None]:
        while True:
            with self.gpu.on(self._stream):
                try:
                    next(exchange)
                except StopIteration:
                    return
            yield
