"""The compression of one model's gradients, with what is remembered from step to step."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.compression.compression import Compression, Means, Tensor
from chainermn.compression.memory import LOSS_SCALE, Memory
from chainermn.gradients.parameters import named_parameters
from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.reducer import Array, Steps

if TYPE_CHECKING:
    from chainer.variable import VariableNode

    from chainermn.gradients.buckets import AnyBucket

#: What one rank remembers: for each parameter, arrays by name.
State = Mapping[str, Mapping[str, Any]]

_LABEL = "label"
_COUNT = "parameters"


class Compressor:
    """Compresses the gradients of one model.

    Attributes
    ----------
    compression : Compression
    n_exchanges : int
        How often gradients have been averaged.
    why_not_loaded : str
        Why the last snapshot did not tell what this rank remembered; empty if it did.
    """

    def __init__(self, compression: Compression, rank: int, size: int) -> None:
        self.compression = compression
        self.n_exchanges = 0
        self.why_not_loaded = "no snapshot was loaded"
        self._rank = rank
        self._size = size
        self._memories: dict[str, Memory] = {}
        self._names: dict[VariableNode, str] = {}
        self._loaded: State = {}
        #: The buckets of the blocking exchange, by what they depend on.
        self.buckets: dict[Hashable, Sequence[AnyBucket]] = {}
        self._n_loads = 0

    @property
    def phase(self) -> Hashable:
        """What changes when an exchange under way becomes useless."""
        return self._n_loads, self.is_on

    @property
    def is_on(self) -> bool:
        """Whether gradients are compressed by now."""
        return self.n_exchanges >= self.compression.start_iteration

    def look_at(self, model: chainer.Link) -> None:
        """Learn the names of the parameters, under which things are remembered."""
        self._names = {parameter.node: name for name, parameter in named_parameters(model)}

    def compresses(self, parameter: chainer.Parameter) -> bool:
        """Tell whether the gradient of this parameter is compressed by now."""
        return self.is_on and self.compression.compresses(parameter.shape)

    def memory_of(self, parameter: chainer.Parameter) -> tuple[str, Memory]:
        """Return the name of a parameter, and what is remembered of it."""
        name = self._names[parameter.node]
        memory = self._memories.get(name)
        if memory is None or not memory.fits(parameter.array):
            memory = self._memories[name] = Memory(parameter.array)
            if name in self._loaded:
                memory.load(self._loaded[name])
        return name, memory

    def commit(self, buckets: Sequence[AnyBucket]) -> None:
        """Remember what the exchange of these buckets has left, now that its means are used.

        Where a mean is not finite, all is forgotten: Chainer skips the step, or it fails.
        """
        compressed = [bucket for bucket in buckets if isinstance(bucket, CompressedBucket)]
        if all(bucket.is_finite for bucket in compressed):
            for bucket in compressed:
                bucket.commit()
        self.n_exchanges += 1

    def copy(self) -> Compressor:
        """Return a compressor that remembers the same."""
        twin = Compressor(self.compression, self._rank, self._size)
        twin.n_exchanges = self.n_exchanges
        twin._loaded = copy.deepcopy(self.state())
        return twin

    # ---- snapshots ----

    def state(self) -> State:
        """Return what this rank remembers."""
        return {
            **self._loaded,
            **{name: memory.state() for name, memory in self._memories.items()},
        }

    def save(self, serializer: chainer.Serializer, of_others: Mapping[int, State] = {}) -> None:
        """Save what this rank remembers, and what others do that have sent it here."""
        serializer(_LABEL, np.array([self._size, self.n_exchanges]))
        for rank, state in {**of_others, self._rank: self.state()}.items():
            of_rank = serializer[f"rank{rank}"]
            of_rank(_COUNT, np.array(len(state)))
            for name, arrays in state.items():
                of_parameter = of_rank[name]
                for key, array in arrays.items():
                    of_parameter(key, array)

    def load(self, serializer: chainer.Deserializer, model: chainer.Link) -> None:
        """Load what this rank remembered; see `why_not_loaded`."""
        self.forget()
        label = _loaded(serializer, _LABEL)
        if label is None:
            self.why_not_loaded = "the snapshot was written without compression"
            return
        size, n_exchanges = map(int, label)
        of_rank = serializer[f"rank{self._rank}"]
        if size != self._size:
            self.why_not_loaded = f"the snapshot is from {size} ranks, but there are {self._size}"
        elif _loaded(of_rank, _COUNT) is None:
            self.why_not_loaded = (
                f"the snapshot lacks what rank {self._rank} remembered. Write it by "
                "chainermn.extensions.multi_node_snapshot, or use a multi-node checkpointer"
            )
        else:
            self.why_not_loaded = ""
            self._loaded = _states(of_rank, model, self.compression.remembers)
        self.n_exchanges = n_exchanges

    def forget(self) -> None:
        """Begin anew, except for the number of exchanges."""
        self._memories, self._loaded = {}, {}
        self._n_loads += 1


class CompressedBucket:
    """Gradients that are compressed, and exchanged together; otherwise as a `Bucket`."""

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[chainer.Parameter],
        compressor: Compressor,
    ) -> None:
        self.members = members
        self.on_gpu = on_gpu(parameters[0].array)
        self._parameters = parameters
        self._compressor = compressor
        self._memories = [compressor.memory_of(parameter) for parameter in parameters]

    def gather(self, gradients: Sequence[Array]) -> None:
        """Take one-dimensional contiguous gradients, which must not change until `scatter`."""
        self._tensors = [
            Tensor(name, gradient, parameter._loss_scale, memory)
            for (name, memory), parameter, gradient in zip(
                self._memories, self._parameters, gradients, strict=True
            )
        ]

    def exchange(self, collectives: Collectives) -> Steps:
        """Average the gradients over the ranks."""
        compressor = self._compressor
        n_steps = compressor.n_exchanges - compressor.compression.start_iteration
        steps = compressor.compression.exchange(self._tensors, collectives, n_steps)
        while True:
            # A warning turned into an error would stop only one rank. It must not be off while
            # others run.
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
            for write, gradient, (_, memory) in zip(
                self._means.write, gradients, self._memories, strict=True
            ):
                if gradient.dtype == memory.dtype:
                    write(gradient)
                else:
                    mean = memory.zeros(gradient.size)
                    write(mean)
                    gradient[...] = mean

    @property
    def is_finite(self) -> bool:
        """Whether all means are finite: the same on all ranks."""
        return bool(self._means.is_finite)

    def commit(self) -> None:
        """Remember what the exchange has left."""
        for _, memory in self._memories:
            memory.commit()


def _states(of_rank: chainer.Deserializer, model: chainer.Link, keys: Sequence[str]) -> State:
    states = {}
    for name, _ in named_parameters(model):
        of_parameter = of_rank[name]
        loaded = {key: _loaded(of_parameter, key) for key in (*keys, LOSS_SCALE)}
        if loaded[LOSS_SCALE] is not None:
            states[name] = {key: array for key, array in loaded.items() if array is not None}
    return states


def _loaded(serializer: chainer.Deserializer, key: str) -> Any:
    """Return an array of a snapshot, or None if it is not there."""
    try:
        return serializer(key, None)
    except (KeyError, ValueError):  # what npz and HDF5 raise
        return None
