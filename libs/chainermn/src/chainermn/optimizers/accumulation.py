"""Add up the gradients of several batches for one step, so that the sum is their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import chainer

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


def check_loss_is_given(lossfun: Callable[..., Any] | None, n: int) -> None:
    """Raise ValueError if an update that accumulates ``n`` batches gets no function."""
    if lossfun is None and n > 1:
        raise ValueError(
            f"accumulate={n} needs update(lossfun, ...), as chainer.training.StandardUpdater "
            "calls it. In your own training loop, call loss.backward() several times before "
            "update()"
        )


def divide(loss: chainer.Variable, loss_scale: float | None, n: int) -> None:
    """Let backward of a loss compute an ``n``-th of its gradients."""
    with chainer.using_device(loss.device):
        seed = (1 if loss_scale is None else loss_scale) / n
        loss.grad = loss.device.xp.full_like(loss.array, seed)


def weigh(parameters: Iterable[chainer.Parameter], n: int, n_batches: int) -> None:
    """Turn gradients of fewer batches than ``n`` into their mean."""
    for parameter in parameters:
        if parameter.grad is not None and n_batches:
            # Gradients may share an array, or be read-only.
            parameter.grad = parameter.grad * (n / n_batches)


def check_equal_counts(communicator: CommunicatorBase, n_batches: int, problem: str) -> None:
    """Raise on all ranks unless all have the same number of batches. Collective."""
    counts = communicator.allgather_obj(n_batches)
    if len(set(counts)) > 1:
        shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
        raise ValueError(
            f"{problem}: {shown}. Give all ranks the same number of examples, as "
            "scatter_dataset does with force_equal_length=True"
        )
