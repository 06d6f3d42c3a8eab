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

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.variable import VariableNode
from numpy.typing import NDArray

from chainermn import spans
from chainermn.agreement import any_true
from chainermn.failures.activity import collective
from chainermn.gradients.buckets import Wire
from chainermn.gradients.overlap.plan import EarlyExchange, Plan
from chainermn.gradients.overlap.progress import ProgressEngine
from chainermn.gradients.overlap.readiness import Uses, find_uses, gradient_hooks
from chainermn.gradients.overlap.streams import Streams
from chainermn.gradients.parameters import (
    Agreement,
    Proposal,
    fill_missing_gradients,
    initialized_parameters,
)
from chainermn.gradients.step import Step
from chainermn.transport.gpu.device import recordable
from chainermn.transport.host.mpi import load_mpi, thread_support

if TYPE_CHECKING:
    from chainermn.gradients.compressor import Compressor
    from chainermn.gradients.exchange import GradientExchange

# While one bucket waits for other ranks, another is reduced.
_BUCKETS_UNDER_WAY = 2

# Kept alive, because MPI or a GPU may still write to their memory.
_never_completed: list[Any] = []


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
        self._streams = Streams(exchange, _BUCKETS_UNDER_WAY)
        support = thread_support(exchange.topology.inter_size)
        #: Whether the training thread alone enqueues work. NCCL then makes progress by itself.
        self.is_advanced_here = exchange.algorithm.uses_nccl
        if self.is_advanced_here:
            support = "funneled"
        self._engine = ProgressEngine(self._streams.in_host_memory, support)
        self._uses: Mapping[VariableNode, Uses] | None = None
        # Equal on all ranks, because it only changes when they agree.
        self._plan = self._plan_for([])
        # Belongs to the same iteration on every rank that has one.
        self._early: EarlyExchange | None = None
        # How many plans ranks have agreed on: graphs follow the plan of their time.
        self._n_plans = 0
        # Plans that CUDA graphs follow.
        self._recorded: list[Plan] = []

    def backward(
        self,
        loss: chainer.Variable,
        loss_scale: Any,
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
        wire = self.wire
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
            hooks = gradient_hooks(early, uses, loss_scale, current.give)
            with self._engine.in_backward(), hooks:
                loss.backward(loss_scale=loss_scale)
        except BaseException:
            current.abandon()
            raise
        late |= current.changed()
        current.give_rest()

    @collective("multi_node_mean_grad")
    def mean(self, model: chainer.Link, zero_fill: bool, step: Step) -> Step:
        """Replace every gradient of ``model`` with its mean over the ranks. Collective.

        Parameters, return value and errors are those of `GradientExchange.mean`.
        """
        exchange, early, wire = self._exchange, self._early, self.wire
        parameters = [
            p for p in initialized_parameters(model).values() if zero_fill or p.grad is not None
        ]
        knows_order = exchange.topology.rank == 0 and self._uses is not None
        step = step._replace(
            has_begun=early is not None,
            is_stale=early is not None and not early.is_valid(wire),
            needs_plan=not self._plan.is_for(parameters, wire)
            or (knows_order and not self._plan.follows_graph),
        )
        proposal = Proposal(model, zero_fill, wire.gpu, step)
        self._maximum(proposal.packed)
        step = proposal.agreed(exchange.mpi_comm).step
        if step.pauses:
            return step
        exchange.has_averaged = True
        if step.has_begun and (step.is_stale or step.needs_plan):
            self._complete(of_use=False)
        if step.needs_plan:
            if self._compressor is not None:
                self._compressor.name_parameters(model)
            self._plan = self._agree_on_plan(parameters, exchange.embeddings_of(model))
        completed = self._complete()
        with spans.span("hand back"):
            completed.hand_out()
        exchange.check_overflow(model, self._plan.buckets, self._streams.all)
        if self._compressor is not None:
            self._compressor.commit(self._plan.buckets, self._plan.parameters)
        self._uses = None
        return step

    @property
    def key(self) -> Hashable:
        """What an exchange that a CUDA graph has recorded depends on."""
        return self.wire, self._n_plans

    @collective("update")
    def agree_ahead(self, model: chainer.Link, step: Step) -> Agreement:
        """Agree on the gradients that `repeat` averages; see `GradientExchange`. Collective."""
        parameters, wire = list(initialized_parameters(model).values()), self.wire
        step = step._replace(
            has_begun=self._early is not None,
            needs_plan=not self._plan.is_for(parameters, wire),
        )
        proposal = Proposal(model, zero_fill=True, wire_dtype=wire.gpu, step=step)
        self._maximum(proposal.packed)
        return proposal.agreed_ahead()

    def repeat(self, agreed: Agreement, compute: Callable[[], None]) -> None:
        """Compute gradients and average them as planned; see `GradientExchange`.

        Raises a RuntimeError, after the exchange, if a gradient changed after it had seemed final.
        """
        with recordable():
            try:
                compute()
                self._repeat(agreed)
            except BaseException:
                # What was to be recorded is no use to the next step.
                if self._early is not None:
                    with contextlib.suppress(Exception):
                        self._early.wait()
                    self._early = None
                raise

    @collective("multi_node_mean_grad")
    def _repeat(self, agreed: Agreement) -> None:
        self._recorded.append(self._plan)
        is_valid = self._early is None or self._early.is_valid(self.wire)
        fill_missing_gradients(agreed.parameters)
        completed = self._complete(of_use=is_valid)
        self._uses = None
        if not is_valid:
            raise RuntimeError(
                f"rank {self._exchange.topology.rank}: gradients changed after their exchange had "
                "begun. Do not change them in hooks of functions, or use overlap=False"
            )
        with spans.span("hand back"):
            completed.hand_out()

    def drop(self) -> None:
        """Discard the exchange in progress and the plan for the model. Collective."""
        if any_true(self._exchange.mpi_comm, self._early is not None):
            self._complete(of_use=False)
        self._plan, self._uses = self._plan_for([]), None

    def close(self) -> None:
        """Stop exchanging, even in the middle of an exchange. Not collective."""
        self._engine.end()
        if self._early is None:
            self._streams.give_back()
        else:
            _never_completed.append(self._early)

    @property
    def wire(self) -> Wire:
        """The form in which gradients are sent."""
        return self._exchange.wire_with(self._compressor)

    def _begin(self) -> EarlyExchange:
        self._early = EarlyExchange(self._plan, self._engine, self._streams, self.wire)
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

    def _maximum(self, integers: NDArray[np.int64]) -> None:
        """Replace integers with their maxima over the ranks, while exchanges advance."""
        mpi = load_mpi()
        request = self._exchange.mpi_comm.Iallreduce(mpi.IN_PLACE, integers, mpi.MAX)
        try:
            self._engine.wait_for_mpi(request)
        except BaseException:
            _never_completed.append((request, integers))
            raise

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
        self._n_plans += 1
        in_order = [parameters[index] for index in order]
        plan = self._plan_for(in_order, follows_graph, embeddings)
        if any(bucket.on_gpu for bucket in plan.buckets):
            _ = self._streams.gpu
        return plan

    def _plan_for(
        self,
        parameters: Sequence[chainer.Parameter],
        follows_graph: bool = False,
        embeddings: Set[VariableNode] = frozenset(),
    ) -> Plan:
        return Plan(
            parameters,
            self.wire,
            self._exchange.topology.size,
            follows_graph=follows_graph,
            compressor=self._compressor,
            embeddings=embeddings,
        )
