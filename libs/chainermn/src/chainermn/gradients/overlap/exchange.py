"""The overlapped exchange: average gradients while backward is still computing others.

Gradients are gathered into buckets, roughly in the order in which backward finishes them, and
each full bucket is exchanged immediately in the background, as in Horovod (Sergeev and Del Balso,
"Horovod: fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799, 2018) and
PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", PVLDB 13(12), 2020).

An early exchange works on copies and assumes that the gradients will not change again. After
backward, the ranks agree on whether this was true. If it was, the means become the gradients.
Otherwise, the means are discarded and the current gradients are exchanged. So the result is always
the same as without overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING

import chainer
from chainer.variable import VariableNode

from chainermn import spans
from chainermn.agreement import any_true, maximum_by
from chainermn.failures.activity import collective
from chainermn.gradients.buckets import AnyBucket, Wire
from chainermn.gradients.overlap.lanes import GpuLane, exchange_of
from chainermn.gradients.overlap.plan import EarlyExchange, Plan
from chainermn.gradients.overlap.progress import Exchange, ProgressEngine
from chainermn.gradients.overlap.readiness import Uses, find_uses, taps
from chainermn.gradients.parameters import agree_on_gradients, initialized_parameters
from chainermn.transport.host.mpi import thread_support
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainermn.gradients.compressor import Compressor
    from chainermn.gradients.exchange import GradientExchange

# While one bucket waits for other ranks, another is reduced.
_BUCKETS_UNDER_WAY = 2

# Kept alive, because a GPU may still write to their memory.
_never_completed: list[EarlyExchange] = []


class OverlappedExchange:
    """Averages the gradients of one model over the ranks. Creating one is collective.

    Allocates memory for another copy of the gradients. Gradients in GPU memory are exchanged on a
    separate stream. This duplicates ``exchange``, which stays free for other uses. A
    ``compressor``, if given, compresses the gradients.
    """

    def __init__(self, exchange: GradientExchange, compressor: Compressor | None = None) -> None:
        self._exchange = exchange
        self._compressor = compressor
        self.group = exchange.group
        self._duplicates = [exchange.duplicate() for _ in range(_BUCKETS_UNDER_WAY)]
        lanes = [duplicate.made for duplicate in self._duplicates]
        for number, lane in enumerate(lanes, 1):
            lane.set_up(on_gpu=False)
            lane.track = f"exchange {number}"
        support = thread_support(exchange.topology.inter_size)
        if exchange.algorithm.uses_nccl:
            support = "funneled"  # NCCL makes progress by itself once its work is enqueued
        self._engine = ProgressEngine(lanes, support)
        self._uses: Mapping[VariableNode, Uses] | None = None
        # Equal on all ranks, because it only changes when they agree.
        self._plan = self._plan_for([])
        # Belongs to the same iteration on every rank that has one.
        self._early: EarlyExchange | None = None

    def backward(
        self,
        loss: chainer.Variable,
        loss_scale: float | None,
        model: chainer.Link,
        zero_fill: bool,
    ) -> None:
        """Compute gradients as ``loss.backward`` does, and start exchanging those of ``model``.

        Not collective: other ranks do not have to call it. Call :meth:`mean` afterwards, with the
        same ``model`` and ``zero_fill``.
        """
        parameters = list(initialized_parameters(model).values())
        uses = self._uses = find_uses(loss, parameters)
        if uses is not None and not zero_fill:
            parameters = [p for p in parameters if p.node in uses or p.grad_var is not None]
        wire = self._wire
        if uses is None or self._early or not self._plan.is_for(parameters, wire):
            loss.backward(loss_scale=loss_scale)
            return
        current, late = self._begin(), self._plan.late
        early = [parameter for parameter in parameters if parameter.node not in late]
        try:
            for parameter in early:
                if parameter.node not in uses:
                    if parameter.grad_var is None:
                        parameter._loss_scale = loss_scale
                    current.give(parameter)
            with self._engine.in_backward(), taps(early, uses, loss_scale, current.give):
                loss.backward(loss_scale=loss_scale)
        except BaseException:
            current.abandon()
            raise
        late |= current.changed()
        current.give_rest()

    @collective("multi_node_mean_grad")
    def mean(
        self, model: chainer.Link, zero_fill: bool, unless: Sequence[bool] = ()
    ) -> tuple[bool, ...]:
        """Replace every gradient of ``model`` with its mean over the ranks. Collective.

        Parameters, return value and errors are those of `GradientExchange.mean`.
        """
        exchange, plan = self._exchange, self._plan
        wire = self._wire
        parameters = [
            p for p in initialized_parameters(model).values() if zero_fill or p.grad is not None
        ]
        has_begun = self._early is not None
        is_stale = self._early is not None and not self._early.is_valid(wire)
        needs_plan = not plan.is_for(parameters, wire) or self._knows_better_than(plan)
        flags = has_begun, is_stale, needs_plan
        agreed = agree_on_gradients(
            *(exchange.mpi_comm, model, zero_fill, wire.gpu),
            *(unless, flags, maximum_by(exchange.mpi_comm, self._engine.wait_for_mpi)),
        )
        if any(agreed.unless):
            return agreed.unless
        begun, stale, renew = agreed.flags
        if begun and (stale or renew):
            self._complete(of_use=False)
        if renew:
            if self._compressor is not None:
                self._compressor.look_at(model)
            self._plan = self._agree_on_plan(parameters, exchange.embeddings_of(model))
        completed = self._complete()
        with spans.span("hand back"):
            completed.hand_out()
        lanes = [duplicate.made for duplicate in self._duplicates]
        exchange.check_overflow(model, self._plan.buckets, lanes)
        if self._compressor is not None:
            self._compressor.commit(self._plan.buckets, self._plan.parameters)
        self._uses = None
        return agreed.unless

    def drop(self) -> None:
        """Discard the exchange in progress and the plan for the model. Collective."""
        if any_true(self._exchange.mpi_comm, self._early is not None):
            self._complete(of_use=False)
        self._plan, self._uses = self._plan_for([]), None

    def close(self) -> None:
        """Stop exchanging, even in the middle of an exchange. Not collective."""
        self._engine.end()
        if self._early is None:
            for duplicate in self._duplicates:
                duplicate.give_back()
        else:
            _never_completed.append(self._early)

    @property
    def _wire(self) -> Wire:
        return self._exchange.wire_with(self._compressor)

    def _begin(self) -> EarlyExchange:
        self._early = EarlyExchange(self._plan, self._engine, self._exchange_of, self._wire)
        return self._early

    def _complete(self, of_use: bool = True) -> EarlyExchange:
        """Complete the exchange in progress, or a new one."""
        current = self._early or self._begin()
        if of_use:
            current.give_rest()
        else:
            current.abandon()
        current.wait()
        self._early = None
        return current

    def _exchange_of(self, bucket: AnyBucket, gradients: Sequence[Array], wire: Wire) -> Exchange:
        make = self._gpu_lane.exchange_of if bucket.on_gpu else exchange_of
        return make(bucket, gradients, wire)

    @cached_property
    def _gpu_lane(self) -> GpuLane:
        """The lane for gradients in GPU memory. Creating it is collective."""
        duplicate = self._exchange.duplicate()
        self._duplicates.append(duplicate)
        duplicate.made.track = "enqueuing on the GPU"
        return GpuLane(duplicate.made)

    def _knows_better_than(self, plan: Plan) -> bool:
        is_root = self._exchange.topology.rank == 0
        return is_root and self._uses is not None and not plan.follows_graph

    def _agree_on_plan(
        self, parameters: Sequence[chainer.Parameter], embeddings: Set[VariableNode]
    ) -> Plan:
        """Make a plan that follows the order in which gradients become final on rank 0."""
        uses = self._uses
        order = list(reversed(range(len(parameters))))
        if uses is not None:
            ranks = [uses[p.node].lowest_rank if p.node in uses else -1 for p in parameters]
            order.sort(key=ranks.__getitem__, reverse=True)
        order, follows_graph = self._exchange.mpi_comm.bcast((order, uses is not None))
        in_order = [parameters[index] for index in order]
        plan = self._plan_for(in_order, follows_graph, embeddings)
        if any(bucket.on_gpu for bucket in plan.buckets):
            _ = self._gpu_lane
        return plan

    def _plan_for(
        self,
        parameters: Sequence[chainer.Parameter],
        follows_graph: bool = False,
        embeddings: Set[VariableNode] = frozenset(),
    ) -> Plan:
        size = self._exchange.topology.size
        return Plan(*(parameters, self._wire, size, follows_graph), self._compressor, embeddings)
