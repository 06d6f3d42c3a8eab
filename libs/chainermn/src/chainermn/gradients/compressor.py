"""Compress one model's gradients, with a memory from step to step."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.channels_last import as_shaped, as_stored, is_channels_last
from chainermn.compression.compression import Compression, Means, Tensor
from chainermn.compression.memory import LOSS_SCALE, Memory
from chainermn.gradients.bucket import Bucket
from chainermn.gradients.parameters import named_parameters
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.reducer import Array, Steps

if TYPE_CHECKING:
    from chainer.variable import VariableNode

#: Memory of one rank: for each parameter, arrays by name.
State = Mapping[str, Mapping[str, Any]]


class Compressor:
    """Compresses the gradients of one model.

    Attributes
    ----------
    compression : Compression
        Compression of the gradients.
    n_exchanges : int
        Number of times that gradients have been averaged.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.n_exchanges = 0
        self._memories: dict[str, Memory] = {}
        self._names: dict[VariableNode, str] = {}
        self._loaded: dict[str, Mapping[str, Any]] = {}
        #: Buckets of the blocking exchange, by everything that they depend on.
        self.buckets: dict[Hashable, Sequence[Bucket]] = {}
        self._n_loads = 0

    @property
    def phase(self) -> Hashable:
        """Key whose change makes an exchange in progress useless."""
        return self._n_loads, self.is_on

    @property
    def is_on(self) -> bool:
        """Whether gradients are already being compressed."""
        return self.n_exchanges >= self.compression.start_iteration

    def name_parameters(self, model: chainer.Link) -> None:
        """Learn the names of the parameters, which are the keys of the memory."""
        self._names = {parameter.node: name for name, parameter in named_parameters(model)}

    def takes(self, parameter: chainer.Parameter, has_rows: bool) -> bool:
        """Tell whether the compression now exchanges the gradient of this parameter.

        ``has_rows`` tells whether only rows of it would be sent without compression.
        """
        compression = self.compression
        takes_uncompressed = compression.takes_all and not has_rows
        return self.is_on and (takes_uncompressed or compression.compresses(parameter.shape))

    def memory_of(self, parameter: chainer.Parameter) -> tuple[str, Memory]:
        """Return the name and the memory of a parameter."""
        name = self._names[parameter.node]
        memory = self._memories.get(name)
        if memory is None or not memory.fits(parameter.array):
            memory = self._memories[name] = Memory(parameter.array)
            if loaded := self._loaded.pop(name, None):
                memory.load(loaded)
        return name, memory

    def bucket(
        self,
        members: Sequence[int],
        parameters: Sequence[chainer.Parameter],
        *,
        may_be_discarded: bool,
    ) -> CompressedBucket:
        """Return a bucket whose gradients this compresses; see `CompressedBucket`."""
        return CompressedBucket(members, parameters, self, may_be_discarded)

    def commit(self, buckets: Sequence[Bucket], parameters: Iterable[chainer.Parameter]) -> None:
        """Update the memory, now that the means have become the gradients.

        If a mean is not finite, discard this exchange: with loss scaling, Chainer skips the whole
        step. Without loss scaling, also discard the memory of earlier steps.
        """
        compressed = [bucket for bucket in buckets if isinstance(bucket, CompressedBucket)]
        if all(bucket.is_finite for bucket in compressed) and all(
            bool(np.isfinite(parameter.grad).all())
            for parameter in parameters
            if parameter._loss_scale is not None
        ):
            for bucket in compressed:
                bucket.commit()
        else:
            for bucket in compressed:
                bucket.discard()
        self.n_exchanges += 1

    def copy(self) -> Compressor:
        """Return a compressor with a copy of the memory."""
        twin = Compressor(self.compression)
        twin.load(self.n_exchanges, copy.deepcopy(self.state()))
        return twin

    # ---- snapshots ----

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays that a state may contain for each parameter."""
        return (*self.compression.remembers, LOSS_SCALE)

    def state(self) -> State:
        """Return this rank's memory."""
        of_memories = {
            name: state for name, memory in self._memories.items() if (state := memory.state())
        }
        return {**self._loaded, **of_memories}

    def load(self, n_exchanges: int, state: State) -> None:
        """Continue from a state; an empty state clears the memory."""
        self.n_exchanges = n_exchanges
        self._memories = {}
        self._loaded = {
            name: {key: array for key, array in arrays.items() if key in self.keys}
            for name, arrays in state.items()
            if LOSS_SCALE in arrays
        }
        self._n_loads += 1


class CompressedBucket:
    """Gradients that a compression exchanges together; see `Bucket` for the rest.

    It works on them in Chainer's order, which its memory in snapshots has too.

    ``may_be_discarded`` tells whether gradients may still change during the exchange.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[chainer.Parameter],
        compressor: Compressor,
        may_be_discarded: bool,
    ) -> None:
        self.members = members
        self._may_be_discarded = may_be_discarded
        self.on_gpu = on_gpu(parameters[0].array)
        self._parameters = parameters
        self._compressor = compressor
        self._memories = [compressor.memory_of(parameter) for parameter in parameters]

    def gather(self, gradients: Sequence[Array]) -> None:
        """Take one-dimensional contiguous gradients, which must not change until `scatter`."""
        self._tensors = []
        for (name, memory), parameter, gradient in zip(
            self._memories, self._parameters, gradients, strict=True
        ):
            in_place = not self._may_be_discarded and parameter._loss_scale is None
            memory.start(parameter._loss_scale, in_place)
            in_order = _shaped(gradient, parameter).reshape(-1)
            self._tensors.append(Tensor(name, in_order, memory))

    def exchange(self, collectives: Collectives) -> Steps:
        """Average the gradients over the ranks."""
        compressor = self._compressor
        n_steps = compressor.n_exchanges - compressor.compression.start_iteration
        steps = compressor.compression.exchange(self._tensors, collectives, n_steps)
        while True:
            # A warning turned into an error would stop only one rank. Warnings are only off
            # between two yields, because other code runs in the meantime.
            with np.errstate(all="ignore"):
                try:
                    pending = next(steps)
                except StopIteration as end:
                    self._means: Means = end.value
                    return
            yield pending

    def scatter(self, gradients: Sequence[Array]) -> None:
        """Write the means into the gradients."""
        with np.errstate(all="ignore"):
            for write, gradient, parameter, (_, memory) in zip(
                self._means.write, gradients, self._parameters, self._memories, strict=True
            ):
                shaped = _shaped(gradient, parameter)
                if gradient.dtype == memory.dtype and shaped.flags.c_contiguous:
                    write(gradient)
                else:
                    mean = memory.zeros(gradient.size)
                    write(mean)
                    shaped[...] = mean.reshape(shaped.shape)

    @property
    def is_finite(self) -> bool:
        """Whether all means are finite; the answer is the same on all ranks."""
        return bool(self._means.is_finite)

    def commit(self) -> None:
        """Update the memory after the exchange."""
        for _, memory in self._memories:
            memory.commit()

    def discard(self) -> None:
        """Discard the exchange, whose means are useless."""
        for _, memory in self._memories:
            memory.discard()


def _shaped(flat: Array, parameter: chainer.Parameter) -> Array:
    """Return a view of a flat gradient with the parameter's shape."""
    is_last = is_channels_last(parameter.array)
    return as_shaped(flat.reshape(as_stored(parameter.array, is_last).shape), is_last)
