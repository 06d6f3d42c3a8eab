"""Gradients averaged while backward still computes others.

Gradients are gathered into buckets in about the order in which backward makes them final, and
each full bucket is exchanged at once, in the background: as in Horovod (Sergeev and Del Balso,
"Horovod: fast and easy distributed deep learning in TensorFlow", arXiv:1802.05799, 2018) and
PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", PVLDB 13(12), 2020).

What is exchanged early is a copy, on the guess that the gradient stays as it is. When backward
is over the ranks agree on whether all guesses were right. If so the means are handed out; if not
they are thrown away, and the gradients that the parameters have by then are exchanged. So the
result is never another one than without overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.variable import VariableNode

from chainermn.agreement import any_true
from chainermn.communicators.duplicates import borrow, give_back
from chainermn.communicators.messages import Array
from chainermn.failures.activity import waiting
from chainermn.gradients.gpu_buckets import gpu_zeros
from chainermn.gradients.overflow import check_overflow
from chainermn.gradients.overlap.buckets import (
    Bucket,
    GpuBucket,
    HostBucket,
    SideStream,
    SumInSteps,
    WireDtypes,
)
from chainermn.gradients.overlap.plan import Plan, Round
from chainermn.gradients.overlap.progress import PollingEngine, ThreadEngine
from chainermn.gradients.overlap.readiness import Uses, find_uses, taps
from chainermn.gradients.parameters import named_parameters
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.host.casts import FLOAT16
from chainermn.transport.host.mpi import threads_may_call
from chainermn.transport.reducer import Steps

if TYPE_CHECKING:
    from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

# While one waits for other ranks, another is being added up.
_BUCKETS_UNDER_WAY = 2

# A GPU may still write to the memory of these.
_never_completed: list[Round] = []


class OverlappedExchange:
    """Averages the gradients of one model over the ranks. Making one is collective.

    Takes memory for another copy of the gradients, besides what the duplicates of the
    communicator take. Those in GPU memory are exchanged on a stream of their own.

    Parameters
    ----------
    communicator : MpiCommunicatorBase
        Stays free for other use.
    """

    def __init__(self, communicator: MpiCommunicatorBase) -> None:
        self._communicator = communicator
        self._loans = [borrow(communicator) for _ in range(_BUCKETS_UNDER_WAY)]
        for loan in self._loans:
            # The first exchange makes what an exchange needs, and waits for other ranks in it.
            loan.communicator._allreduce_mean(np.zeros(1, np.float32))
        # NCCL is given its work at once, and carries on with it alone.
        needs_thread = not communicator.uses_nccl
        may_thread = threads_may_call(communicator.inter_size)
        kind = ThreadEngine if needs_thread and may_thread else PollingEngine
        self._engine = kind(_BUCKETS_UNDER_WAY)
        self._uses: Mapping[VariableNode, Uses] | None = None
        # The same on all ranks, as it changes only where they agree on it.
        self._plan = self._plan_for([])
        # At most one, and the same one on all ranks that have one.
        self._round: Round | None = None

    def backward(
        self,
        loss: chainer.Variable,
        loss_scale: float | None,
        model: chainer.Link,
        zero_fill: bool,
    ) -> None:
        """Compute gradients as ``loss.backward`` does, and begin to exchange those of ``model``.

        Not collective: another rank may do without. To be followed by :meth:`mean`.
        """
        parameters = _initialised(model)
        uses = self._uses = find_uses(loss, parameters)
        if uses is not None and not zero_fill:
            parameters = [p for p in parameters if p.node in uses or p.grad_var is not None]
        if uses is None or self._round or not self._plan.is_for(parameters):
            loss.backward(loss_scale=loss_scale)
            return
        current, late = self._begin(), self._plan.late
        early = [parameter for parameter in parameters if parameter.node not in late]
        try:
            for parameter in early:
                if parameter.node not in uses:
                    current.hand_over(parameter)
            with self._engine.in_backward(), taps(early, uses, loss_scale, current.hand_over):
                loss.backward(loss_scale=loss_scale)
        except BaseException:
            current.abandon()
            raise
        late |= current.changed()
        current.hand_over_rest()

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """Replace every gradient of ``model`` by its mean over the ranks. Collective.

        Parameters
        ----------
        model : chainer.Link
        zero_fill : bool
            As of `CommunicatorBase.multi_node_mean_grad`, which has the same result.

        Raises
        ------
        ValueError, OverflowError
            On every rank, as `CommunicatorBase.multi_node_mean_grad`.
        """
        group = self._communicator._group
        with waiting(group.stream, "multi_node_mean_grad", group.members):
            self._mean(model, zero_fill)
        self._uses = None

    def _mean(self, model: chainer.Link, zero_fill: bool) -> None:
        communicator, current, plan = self._communicator, self._round, self._plan
        parameters = [p for p in _initialised(model) if zero_fill or p.grad is not None]
        is_stale = current is not None and not current.is_valid(self._wire_dtypes)
        needs_plan = not plan.is_for(parameters) or self._knows_better_than(plan)
        _, (begun, stale, renew) = communicator._agree(
            model, zero_fill, (current is not None, is_stale, needs_plan)
        )
        if begun and (stale or renew):
            self._complete(of_use=False)
        if renew:
            self._plan = self._agree_on_plan(parameters)
        self._complete().hand_out()
        if not self._plan.is_for_gpu_alone:
            self._check_overflow(model)

    def drop(self) -> None:
        """Forget the gradients under way and what is known of the model. Collective."""
        if any_true(self._communicator.mpi_comm, self._round is not None):
            self._complete(of_use=False)
        self._plan = self._plan_for([])

    def close(self) -> None:
        """Carry on with nothing more. Not collective."""
        self._engine.end()
        if self._round is None:
            give_back(*self._loans)
        else:
            _never_completed.append(self._round)

    def _begin(self) -> Round:
        self._round = Round(self._plan, self._engine, self._wire_dtypes)
        return self._round

    def _complete(self, of_use: bool = True) -> Round:
        """Take part in the round that is under way, or in a new one, to its end."""
        current = self._round or self._begin()
        if of_use:
            current.hand_over_rest()
        else:
            current.abandon()
        current.wait()
        self._round = None
        return current

    @property
    def _wire_dtypes(self) -> WireDtypes:
        communicator = self._communicator
        # Of a single rank nothing travels.
        on_gpu = communicator._gpu_wire_dtype if communicator.size > 1 else None
        return WireDtypes(communicator._wire_dtype, on_gpu)

    def _mean_in_steps(
        self, lane: int, buffer: Array, wire_dtype: np.dtype[Any] | None
    ) -> Iterator[None]:
        duplicate = self._loans[lane].communicator
        duplicate.allreduce_grad_dtype = wire_dtype
        return _carry_on(duplicate._mean_in_steps(buffer))

    def _check_overflow(self, model: chainer.Link) -> None:
        communicator = self._communicator
        if communicator.size > 1 and communicator._wire_dtype == FLOAT16:
            taken = [loan.communicator._reducers.take_overflow() for loan in self._loans]
            check_overflow(communicator.mpi_comm, model, max(taken))

    def _knows_better_than(self, plan: Plan) -> bool:
        return self._communicator.rank == 0 and self._uses is not None and not plan.follows_graph

    def _agree_on_plan(self, parameters: Sequence[chainer.Parameter]) -> Plan:
        """Return a plan in the order in which gradients become final on rank 0."""
        uses = self._uses
        order = list(reversed(range(len(parameters))))
        if uses is not None:
            ranks = [uses[p.node].lowest_rank if p.node in uses else -1 for p in parameters]
            order.sort(key=ranks.__getitem__, reverse=True)
        order, follows_graph = self._communicator.mpi_comm.bcast((order, uses is not None))
        return self._plan_for([parameters[index] for index in order], follows_graph)

    def _plan_for(
        self, parameters: Sequence[chainer.Parameter], follows_graph: bool = False
    ) -> Plan:
        return Plan(parameters, self._make_bucket, follows_graph)

    def _make_bucket(self, parameters: Sequence[chainer.Parameter]) -> Bucket:
        if not on_gpu(parameters[0].array):
            return HostBucket(parameters, self._mean_in_steps)
        stream, sum_in_steps = self._gpu_side
        return GpuBucket(parameters, stream, self._communicator.size, sum_in_steps)

    @cached_property
    def _gpu_side(self) -> tuple[SideStream, SumInSteps]:
        """What exchanges gradients in GPU memory. Making it is collective."""
        stream = SideStream(the_gpu())
        loan = borrow(self._communicator)
        self._loans.append(loan)

        def sum_in_steps(buffer: Array) -> Iterator[None]:
            return _carry_on(loan.communicator._sum_on_gpu_in_steps(buffer))

        def first() -> Iterator[None]:
            zeros = gpu_zeros(stream.gpu, self._communicator.size, np.dtype(np.float32))
            yield from sum_in_steps(zeros)
            stream.gpu.record().Wait()

        # As in host memory, it waits for other ranks.
        for _ in stream.do(first()):
            pass
        return stream, sum_in_steps


def _carry_on(steps: Steps) -> Iterator[None]:
    for pending in steps:
        while not pending.Test():
            yield


def _initialised(model: chainer.Link) -> list[chainer.Parameter]:
    """Return the parameters of ``model`` that have values, each once, in the order of names."""
    by_node = {parameter.node: parameter for _, parameter in named_parameters(model)}
    return [parameter for parameter in by_node.values() if parameter.array is not None]
