"""Plan which gradients are exchanged together, and follow the plan."""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.channels_last import as_stored, is_channels_last
from chainermn.gradients.bucket import flat_gradients
from chainermn.gradients.buckets import Limits, Wire, make_buckets
from chainermn.gradients.overlap.progress import ProgressEngine
from chainermn.gradients.overlap.streams import Streams
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainermn.gradients.compressor import Compressor

#: Most bytes of a bucket in host memory. Measured at 1 Gbit/s: smaller buckets have more overhead,
#: larger ones leave more to exchange after backward.
BUCKET_BYTES = 2 << 20
#: Most bytes of a bucket in GPU memory. Not measured here: the default of PyTorch's
#: DistributedDataParallel (`bucket_cap_mb`), for faster links and for the cost of launching
#: kernels for each bucket.
GPU_BUCKET_BYTES = 25 << 20
# With a compressor, messages are much smaller, so latency matters more.
_COMPRESSED_BUCKET_BYTES = 8 << 20


class Plan:
    """Buckets of gradients, in the order in which all ranks exchange them.

    ``follows_graph`` tells whether backward finishes the gradients in this order.

    Attributes
    ----------
    buckets : list of Bucket
        Gradients that are exchanged together.
    late : set of VariableNode
        Nodes of parameters whose gradients changed on this rank after they had seemed final.
    """

    def __init__(
        self,
        parameters: Sequence[chainer.Parameter],
        wire: Wire,
        n_ranks: int,
        *,
        follows_graph: bool = False,
        compressor: Compressor | None = None,
        embeddings: Set[VariableNode] = frozenset(),
    ) -> None:
        self.parameters = parameters
        self.follows_graph = follows_graph
        self.late: set[VariableNode] = set()
        limits = Limits(BUCKET_BYTES, GPU_BUCKET_BYTES, _COMPRESSED_BUCKET_BYTES)
        self.buckets = make_buckets(
            parameters, limits, wire, n_ranks, compressor=compressor, embeddings=embeddings
        )
        self._wire = wire
        self._places = _places(parameters)

    def is_for(self, parameters: Sequence[chainer.Parameter], wire: Wire) -> bool:
        """Tell whether the plan is for exactly these parameters, in their current memory."""
        return self._places == _places(parameters) and self._wire == wire


class EarlyExchange:
    """The exchange of one iteration, started bucket by bucket in the same order on all ranks.

    A gradient that has been given is read-only until the means are handed out. CuPy cannot enforce
    this, so nobody may write to gradients in GPU memory.
    """

    def __init__(self, plan: Plan, engine: ProgressEngine, streams: Streams, wire: Wire) -> None:
        self._plan = plan
        self._engine = engine
        self._streams = streams
        self._wire = wire
        self._given: dict[VariableNode, _Given] = {}
        self._under_way: list[Future[Any]] = []
        self._gathered: list[Array] = []  # kept alive until the exchange is over
        self._is_abandoned = False

    def give(self, parameter: chainer.Parameter) -> None:
        """Give the gradient of a parameter, unless it has been given before; None means zeros."""
        if parameter.node in self._given:
            return
        read_only = gradient = parameter.grad
        if gradient is not None:
            read_only = gradient.view()
            if not on_gpu(gradient):
                read_only.flags.writeable = False
            # Checking shape and dtype would take longer than everything else here.
            parameter._set_grad_without_check(read_only)
        self._given[parameter.node] = _Given(gradient, read_only)
        self._begin_full_buckets()

    def give_rest(self) -> None:
        """Give all gradients that have not been given yet."""
        for parameter in self._plan.parameters:
            self.give(parameter)

    def abandon(self) -> None:
        """Give zeros for all remaining gradients, because other ranks wait for them."""
        self._is_abandoned = True
        self._give_back()
        for parameter in self._plan.parameters:
            self._given.setdefault(parameter.node, _Given(None, None))
        self._begin_full_buckets()

    def changed(self) -> set[VariableNode]:
        """Return the nodes of parameters whose gradient has changed since it was given."""
        return {
            parameter.node
            for parameter in self._plan.parameters
            if (given := self._given.get(parameter.node)) and parameter.grad is not given.read_only
        }

    def is_valid(self, wire: Wire) -> bool:
        """Tell whether the means will be the means of the current gradients."""
        return not (self._is_abandoned or self._wire != wire or self.changed())

    def wait(self) -> None:
        """Wait until the means are complete; in GPU memory, let the current stream wait."""
        for future in self._under_way:
            event = self._engine.wait(future)
            if event is not None:
                the_gpu().wait_for(event)

    def hand_out(self) -> None:
        """Copy the means into the parameters' own gradient arrays."""
        self._give_back()
        flat = flat_gradients(self._plan.parameters)
        for bucket in self._plan.buckets:
            bucket.scatter([flat[index] for index in bucket.members])

    def _give_back(self) -> None:
        for parameter in self._plan.parameters:
            given = self._given.get(parameter.node)
            if given is not None and parameter.grad is given.read_only:
                parameter._set_grad_without_check(given.gradient)

    def _begin_full_buckets(self) -> None:
        for bucket in self._plan.buckets[len(self._under_way) :]:
            members = [self._plan.parameters[index] for index in bucket.members]
            if any(parameter.node not in self._given for parameter in members):
                return
            gradients = [self._flat_gradient(parameter) for parameter in members]
            exchange = self._streams.exchange_of(bucket, gradients, self._wire)
            self._under_way.append(self._engine.submit(exchange))
            self._gathered += gradients

    def _flat_gradient(self, parameter: chainer.Parameter) -> Array:
        gradient = self._given[parameter.node].gradient
        if gradient is None:
            gradient = np.zeros_like(parameter.array)  # CuPy's, if the parameter is in GPU memory
        return as_stored(gradient, is_channels_last(parameter.array)).reshape(-1)


class _Given(NamedTuple):
    gradient: Array | None
    read_only: Array | None  # the view that replaces it in its parameter for now


def _places(parameters: Sequence[chainer.Parameter]) -> dict[VariableNode, tuple[bool, bool]]:
    return {p.node: (on_gpu(p.array), is_channels_last(p.array)) for p in parameters}
