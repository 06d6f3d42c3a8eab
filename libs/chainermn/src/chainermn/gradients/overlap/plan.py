"""Rounds of an exchange that begins before all gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer.variable import VariableNode
from numpy.typing import NDArray

from chainermn.gradients.buckets import make_exclusive
from chainermn.gradients.gpu_buckets import make_contiguous
from chainermn.gradients.overlap.buckets import Bucket, WireDtypes
from chainermn.gradients.overlap.progress import ProgressEngine
from chainermn.gradients.parameters import divide_by_memory
from chainermn.transport.gpu.device import on_gpu

Array: TypeAlias = NDArray[Any]

# Measured at 1 Gbit/s: smaller ones cost more, larger ones leave more to do after backward.
_BUCKET_BYTES = 2 << 20


class Plan:
    """Which gradients travel together, and when: the same on all ranks.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        In the order in which their gradients are to be exchanged.
    make_bucket : callable
        Returns a `Bucket` for parameters of one dtype in one memory.
    follows_graph : bool
        Whether the order is that in which they become final.

    Attributes
    ----------
    buckets : list of Bucket
    is_for_gpu_alone : bool
        Whether all gradients are in GPU memory.
    late : set of VariableNode
        Of parameters whose gradients, on this rank, were once changed after they seemed final.
    """

    def __init__(
        self,
        parameters: Sequence[chainer.Parameter],
        make_bucket: Callable[[Sequence[chainer.Parameter]], Bucket],
        follows_graph: bool = False,
    ) -> None:
        self.parameters = parameters
        self.follows_graph = follows_graph
        self.late: set[VariableNode] = set()
        self.buckets = [make_bucket(members) for members in _divide(parameters)]
        self._places = _places(parameters)
        self.is_for_gpu_alone = bool(self._places) and all(self._places.values())

    def is_for(self, parameters: Sequence[chainer.Parameter]) -> bool:
        """Tell whether the plan is one for just these parameters, in the memory they are in."""
        return self._places == _places(parameters)


class Round:
    """One exchange of all buckets of a plan, begun bucket by bucket, in the same order everywhere.

    A gradient that has been handed over cannot be written to until it is handed out; one in GPU
    memory, for which CuPy has no such guard, must not be.

    Parameters
    ----------
    plan : Plan
    engine : ProgressEngine
    wire : WireDtypes
    """

    def __init__(self, plan: Plan, engine: ProgressEngine, wire: WireDtypes) -> None:
        self._plan = plan
        self._engine = engine
        self._wire = wire
        self._handed: dict[VariableNode, _Handed] = {}
        self._under_way: list[Future[None]] = []
        self._is_abandoned = False

    def hand_over(self, parameter: chainer.Parameter) -> None:
        """Take the gradient of a parameter, unless it has been taken before; None means zeros."""
        if parameter.node in self._handed:
            return
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = gradient.view()
            if not on_gpu(gradient):
                parameter.grad.flags.writeable = False
        self._handed[parameter.node] = _Handed(gradient, parameter.grad)
        self._begin_full_buckets()

    def hand_over_rest(self) -> None:
        """Take all gradients that have not been taken before."""
        for parameter in self._plan.parameters:
            self.hand_over(parameter)

    def abandon(self) -> None:
        """Give zeros for all gradients that are still to come: the others wait for them."""
        self._is_abandoned = True
        self._give_back()
        for parameter in self._plan.parameters:
            self._handed.setdefault(parameter.node, _Handed(None, None))
        self._begin_full_buckets()

    def changed(self) -> set[VariableNode]:
        """Return the nodes of parameters that have another gradient than they handed over."""
        return {
            parameter.node
            for parameter in self._plan.parameters
            if (handed := self._handed.get(parameter.node))
            and parameter.grad is not handed.read_only
        }

    def is_valid(self, wire: WireDtypes) -> bool:
        """Tell whether the means will be those of the gradients at hand."""
        return not (self._is_abandoned or self._wire != wire or self.changed())

    def wait(self) -> None:
        """Wait until the means are there."""
        for bucket, future in zip(self._plan.buckets, self._under_way, strict=True):
            self._engine.wait(future)
            bucket.arrive()

    def hand_out(self) -> None:
        """Make the means the gradients of the parameters, in the arrays that these had."""
        self._give_back()
        in_host_memory, in_gpu_memory = divide_by_memory(self._plan.parameters)
        make_exclusive(in_host_memory)
        make_contiguous(in_gpu_memory)
        for bucket in self._plan.buckets:
            bucket.hand_out()

    def _give_back(self) -> None:
        for parameter in self._plan.parameters:
            handed = self._handed.get(parameter.node)
            if handed is not None and parameter.grad is handed.read_only:
                parameter.grad = handed.gradient

    def _begin_full_buckets(self) -> None:
        for bucket in self._plan.buckets[len(self._under_way) :]:
            if any(parameter.node not in self._handed for parameter in bucket.parameters):
                return
            gradients = [self._handed[parameter.node].gradient for parameter in bucket.parameters]
            exchange = bucket.exchange(gradients, self._wire)
            self._under_way.append(self._engine.submit(exchange))


class _Handed(NamedTuple):
    gradient: Array | None
    read_only: Array | None  # the view of it that its parameter has meanwhile


def _places(parameters: Sequence[chainer.Parameter]) -> dict[VariableNode, bool]:
    return {parameter.node: on_gpu(parameter.array) for parameter in parameters}


def _divide(parameters: Sequence[chainer.Parameter]) -> list[list[chainer.Parameter]]:
    """Return what travels together, in the order in which the last of its gradients come."""
    full = []
    filling: dict[tuple[np.dtype[Any], bool], list[chainer.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, on_gpu(parameter.array)
        bucket = filling.setdefault(kind, [])
        bucket.append(parameter)
        if sum(member.array.nbytes for member in bucket) >= _BUCKET_BYTES:
            full.append(filling.pop(kind))
    return full + list(filling.values())
