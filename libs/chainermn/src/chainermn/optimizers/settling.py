"""Find the optimizers of a trainer, and prepare them for an evaluation or a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


def optimizers_of(target: Any) -> list[MultiNodeOptimizer]:
    """Return the multi-node optimizers of a trainer or an updater, or ``target`` if it is one."""
    updater = getattr(target, "updater", target)
    optimizers = getattr(updater, "get_all_optimizers", lambda: {"": updater})()
    found = (optimizer for _, optimizer in sorted(optimizers.items()))
    return [optimizer for optimizer in found if isinstance(optimizer, MultiNodeOptimizer)]


def settle(target: Any, communicator: CommunicatorBase | None) -> None:
    """Make the parameters of all ranks equal, then call `compare`. Collective."""
    for optimizer in optimizers_of(target):
        optimizer.settle()
    compare(target, communicator)


def compare(target: Any, communicator: CommunicatorBase | None) -> None:
    """Compare the replicas of the optimizers that use a communicator. Collective.

    With another communicator, not all ranks of an optimizer may be here.
    """
    iteration = getattr(getattr(target, "updater", target), "iteration", None)
    for optimizer in optimizers_of(target):
        if optimizer.communicator is communicator:
            optimizer.compare_replicas(iteration)
