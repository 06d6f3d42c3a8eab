"""Choose how an optimizer averages gradients: by the library, or by a user's own method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.gradients.step import Step

if TYPE_CHECKING:
    import chainer

    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.gradients.compressor import Compressor
    from chainermn.gradients.exchange import GradientExchange


def library_exchange(communicator: CommunicatorBase) -> GradientExchange | None:
    """Return the library's exchange for a communicator; None if a user's method averages."""
    if not isinstance(communicator, MpiCommunicatorBase):
        return None
    method = getattr(communicator.multi_node_mean_grad, "__func__", None)
    is_own = method is MpiCommunicatorBase.multi_node_mean_grad
    return communicator.gradients if is_own else None


def background_exchange(communicator: CommunicatorBase) -> GradientExchange:
    """Return an exchange that can run beside the script; raise RuntimeError if there is none."""
    if exchange := library_exchange(communicator):
        return exchange
    raise RuntimeError(f"{type(communicator).__name__} does not exchange in the background")


def exchange_of(communicator: CommunicatorBase) -> GradientExchange | UsersExchange:
    """Return the exchange of a communicator's gradients."""
    return library_exchange(communicator) or UsersExchange(communicator)


class UsersExchange:
    """Averages gradients by a user's `multi_node_mean_grad`; see `GradientExchange`."""

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator

    def agree(self, step: Step) -> Step:
        """Return what any rank tells about a step. Collective."""
        maxima: Any = self._communicator.allreduce(np.array(step.to_integers(), np.int64), "max")
        return Step.of_all(maxima.tolist())

    def mean(
        self, model: chainer.Link, zero_fill: bool, step: Step, compressor: Compressor | None
    ) -> Step:
        """Average the gradients, unless the step pauses on any rank. Collective."""
        step = self.agree(step)
        if not step.pauses:
            self._communicator.multi_node_mean_grad(model, zero_fill)
        return step
