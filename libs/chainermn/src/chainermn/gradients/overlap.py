"""Rounds of an exchange that begins before all gradients are there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer.variable import VariableNode
from numpy.typing import NDArray

from chainermn.gradients.buckets import make_exclusive
from chainermn.gradients.progress import ProgressEngine

Array: TypeAlias = NDArray[Any]
WireDtype: TypeAlias = np.dtype[Any] | None

#: On a lane, replaces a buffer by its mean over the ranks; yields whenever it waits for them.
MeanInSteps: TypeAlias = Callable[[int, Array, WireDtype], Iterator[None]]

# Measured at 1 Gbit/s: smaller ones cost more, larger ones leave more to do after backward.
_BUCKET_BYTES = 2 << 20


class Plan:
    """Which gradients travel together, and when: the same on all ranks.

    Parameters
    ----------
    parameters : sequence of chainer.Parameter
        In the order in which their gradients are to be exchanged.
    follows_graph : bool
        Whether that is the order in which they become final.

    Attributes
    ----------
    buckets : list of _Bucket
    late : set of VariableNode
        Of parameters whose gradients, on this rank, were once changed after they seemed final.
    """

    def __init__(
        self, parameters: Sequence[chainer.Parameter] = (), follows_graph: bool = False
    ) -> None:
        self.parameters = parameters
        self.follows_graph = follows_graph
        self.late: set[VariableNode] = set()
        self.buckets = [_Bucket(bucket) for bucket in _divide(parameters)]
        self._nodes = {parameter.node for parameter in parameters}

    def is_for(self, parameters: Sequence[chainer.Parameter]) -> bool:
        """Tell whether the plan is one for just these parameters."""
        return self._nodes == {parameter.node for parameter in parameters}


class _Bucket:
    """Memory for some gradients one behind the other, and the view of it for each of them."""

    def __init__(self, parameters: list[chainer.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.size for parameter in parameters]
        self.buffer = np.empty(sum(sizes), parameters[0].dtype)
        parts = np.split(self.buffer, np.cumsum(sizes)[:-1])
        self.parts = [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]


class Round:
    """One exchange of all buckets of a plan, begun bucket by bucket, in the same order everywhere.

    A gradient that has been handed over cannot be written to until it is handed out.
    """

    def __init__(
        self,
        plan: Plan,
        engine: ProgressEngine,
        mean_in_steps: MeanInSteps,
        wire_dtype: WireDtype,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._mean_in_steps = mean_in_steps
        self._wire_dtype = wire_dtype
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

    def is_valid(self, wire_dtype: WireDtype) -> bool:
        """Tell whether the means will be those of the gradients at hand."""
        return not (self._is_abandoned or self._wire_dtype != wire_dtype or self.changed())

    def wait(self) -> None:
        """Wait until the means are there."""
        for future in self._under_way:
            self._engine.wait(future)

    def hand_out(self) -> None:
        """Make the means the gradients of the parameters, in the arrays that these had."""
        self._give_back()
        make_exclusive(self._plan.parameters)
        for bucket in self._plan.buckets:
            for part, parameter in zip(bucket.parts, bucket.parameters, strict=True):
                parameter.grad[...] = part

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
            exchange = functools.partial(self._exchange, bucket, gradients)
            self._under_way.append(self._engine.submit(exchange))

    def _exchange(
        self, bucket: _Bucket, gradients: list[Array | None], lane: int
    ) -> Iterator[None]:
        for part, gradient in zip(bucket.parts, gradients, strict=True):
            part[...] = 0 if gradient is None else gradient
        yield from self._mean_in_steps(lane, bucket.buffer, self._wire_dtype)


class _Handed(NamedTuple):
    gradient: Array | None
    read_only: Array | None  # the view of it that its parameter has meanwhile


def _divide(parameters: Sequence[chainer.Parameter]) -> list[list[chainer.Parameter]]:
    """Return buckets of one dtype each, in the order in which the last of their gradients come."""
    full = []
    filling: dict[np.dtype[Any], list[chainer.Parameter]] = {}
    for parameter in parameters:
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(member.array.nbytes for member in bucket) >= _BUCKET_BYTES:
            full.append(filling.pop(parameter.dtype))
    return full + list(filling.values())
