"""The steps of an optimizer in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class OneProcess:
    """The steps of one of Chainer's optimizers; see `chainer_fast.graphs.steps.Steps`.

    Parameters
    ----------
    optimizer
        The optimizer.
    update
        Its method that takes a step, with the optimizer as its first argument.
    """

    n_ranks = 1

    def __init__(self, optimizer: Any, update: Callable[..., Any]) -> None:
        self.optimizer, self._update = optimizer, update

    def key(self) -> Hashable:
        """See `Steps`."""
        return None

    def why_not(self) -> str | None:
        """See `Steps`."""
        return None

    def agree(self, wish: int) -> int:
        """See `Steps`."""
        return wish

    def reasons(self, reason: str | None) -> Mapping[int, str]:
        """See `Steps`."""
        return {} if reason is None else {0: reason}

    def tell(self, message: str) -> None:
        """See `Steps`."""
        warnings.warn(message, stacklevel=6)

    def eager(self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any) -> None:
        """See `Steps`."""
        self._update(self.optimizer, lossfun, *args, **kwds)

    def gradients(
        self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any, loss_scale: Any
    ) -> None:
        """See `Steps`."""
        loss = lossfun(*args, **kwds)
        if getattr(self.optimizer, "_use_cleargrads", True):
            self.optimizer.target.cleargrads()
        else:
            self.optimizer.target.zerograds()
        loss.backward(loss_scale=loss_scale)
        loss.unchain_backward()

    def launching(self) -> AbstractContextManager[Any]:
        """See `Steps`."""
        return nullcontext()
