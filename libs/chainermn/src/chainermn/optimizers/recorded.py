"""The steps of a multi-node optimizer for CUDA graphs, which are recorded once and then launched.

``actual_optimizer.cuda_graphs`` records and launches them, if there is one: chainer_fast sets it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import chainer

from chainermn import spans
from chainermn.gradients.parameters import Agreement, is_all_on_gpu
from chainermn.gradients.step import Step

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

# What a rank wishes for a step; the names are those of chainer_fast.graphs.steps.
_GIVE_UP, _EAGER, _REPLAY = 0, 1, 4


class Exchange(Protocol):
    """An exchange of gradients that a CUDA graph may record, such as `GradientExchange`."""

    @property
    def key(self) -> Hashable:
        """What a recorded exchange depends on."""

    def agree_ahead(self, model: chainer.Link, step: Step) -> Agreement:
        """Agree on the gradients that `repeat` averages; none if ranks must not. Collective."""

    def repeat(self, agreed: Agreement, compute: Callable[[], None]) -> None:
        """Compute gradients and average them."""


class RecordedSteps:
    """A step that may be an ordinary one, be recorded, or be a CUDA graph.

    The methods are those of ``chainer_fast.graphs.steps.Steps``.

    Parameters
    ----------
    optimizer : chainer.Optimizer
        Optimizer that takes the step.
    communicator : CommunicatorBase
        Communicator of the ranks.
    exchange : Exchange or str
        Exchange of the gradients; or the setting for which no step can be recorded, which is the
        same on all ranks.
    state : Step
        What this rank tells the others about its replica.
    compute : callable
        Function that computes gradients, called as ``compute(lossfun, args, kwds, loss_scale)``.
    eager : callable
        Function that does the whole step, called as ``eager(lossfun, *args, **kwds)``.

    Attributes
    ----------
    n_ranks : int
        Number of ranks.
    """

    def __init__(
        self,
        optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        *,
        exchange: Exchange | str,
        state: Step,
        compute: Callable[..., None],
        eager: Callable[..., None],
    ) -> None:
        self.optimizer = optimizer
        self.n_ranks = communicator.size
        self._communicator = communicator
        self._exchange = exchange
        self._state = state
        self._compute, self._eager = compute, eager
        self._agreed = Agreement(state)

    def key(self) -> Hashable:
        """Return what the exchange of a graph depends on, such as the dtype in which it sends."""
        return None if isinstance(self._exchange, str) else self._exchange.key

    def why_not(self) -> str | None:
        """Return why this rank can never record steps, or None."""
        if isinstance(self._exchange, str):
            return self._exchange
        if chainer.is_debug():
            return "Chainer's debug mode looks at gradients on the host"
        if not is_all_on_gpu(self.optimizer.target):
            return "some parameters are in host memory"
        return None

    def agree(self, wish: int) -> int:
        """Return the lowest wish of all ranks. Collective.

        It is at most `_EAGER` if ranks have to settle something, or exchange different things.
        """
        if isinstance(self._exchange, str):  # as on all ranks
            return _GIVE_UP
        step = self._state._replace(averages_gradients=False, reluctance=1 + _REPLAY - wish)
        self._agreed = self._exchange.agree_ahead(self.optimizer.target, step)
        lowest = 1 + _REPLAY - self._agreed.step.reluctance
        if not self._agreed.parameters:
            lowest = min(lowest, _EAGER)
        return lowest

    def reasons(self, reason: str | None) -> Mapping[int, str]:
        """Return the reasons of the ranks that have one. Collective."""
        if isinstance(self._exchange, str):
            return {0: self._exchange}
        everywhere = self._communicator.allgather_obj(reason)
        return {rank: each for rank, each in enumerate(everywhere) if each is not None}

    def tell(self, message: str) -> None:
        """Warn on rank 0."""
        if self._communicator.rank == 0:
            warnings.warn(message, stacklevel=6)

    def eager(self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any) -> None:
        """Do the whole step, without graphs."""
        self._eager(lossfun, *args, **kwds)

    def gradients(
        self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any, loss_scale: Any
    ) -> None:
        """Enqueue a step up to the update, after `agree` has returned ``RECORD`` on all ranks."""
        assert not isinstance(self._exchange, str)
        self._exchange.repeat(self._agreed, lambda: self._compute(lossfun, args, kwds, loss_scale))

    def launching(self) -> AbstractContextManager[object]:
        """Return a context in which a graph does the step."""
        return spans.span("CUDA graph")
