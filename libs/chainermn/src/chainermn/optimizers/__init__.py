"""Optimizers that average gradients over the ranks before each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainermn.optimizers.double_buffering_optimizer import DoubleBufferingOptimizer
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    import chainer

    from chainermn.communicators.communicator_base import CommunicatorBase

__all__ = ["create_multi_node_optimizer"]


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that its ``update`` takes a step on the mean of all ranks' gradients.

    Parameters
    ----------
    actual_optimizer : chainer.Optimizer
        Any optimizer of Chainer's.
    communicator : CommunicatorBase
    double_buffering : bool
        Exchange the gradients of one iteration while the next one computes its own, so that
        the exchange costs no time; each step is then taken on the mean gradient of the
        iteration before. See `DoubleBufferingOptimizer`.
    zero_fill : bool
        Take a gradient that a rank does not have (``None``) for zeros. Otherwise one that no
        rank has stays ``None``, and one that only some have is an error on all ranks.

    Returns
    -------
    MultiNodeOptimizer
        To be used in place of ``actual_optimizer``; its attributes, hooks and serialisation are
        those of ``actual_optimizer``.

    Notes
    -----
    The first ``update``, and each one after parameters were added or initialised, takes no step
    but gives all ranks the parameters of rank 0: the gradients at hand belong to different
    parameters on different ranks. After loading a snapshot that made all ranks equal, the first
    ``update`` does take its step, so that a resumed run loses none.

    Hooks see the mean gradient, so that ``WeightDecay`` or ``GradientClipping`` act as they do
    in one process with the batches of all ranks. Dynamic loss scaling sees it too: an overflow
    on one rank makes the mean overflow, and all ranks skip the step.
    """
    kind = DoubleBufferingOptimizer if double_buffering else MultiNodeOptimizer
    return kind(actual_optimizer, communicator, zero_fill)
