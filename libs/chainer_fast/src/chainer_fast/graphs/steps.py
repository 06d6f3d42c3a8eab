"""What graphs must know about the steps of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

#: What a rank wishes for a step: no graphs any more, an eager step, to record one, to compare a
#: graph with an eager step, or to launch a graph. Ranks agree on the lowest.
GIVE_UP, EAGER, RECORD, CHECK, REPLAY = range(5)


class Steps(Protocol):
    """The steps of an optimizer, on one rank or on many.

    On many ranks, `agree` and `reasons` are collective, and all ranks make the same calls.

    Attributes
    ----------
    optimizer : chainer.GradientMethod
        Chainer's optimizer that takes the steps.
    n_ranks : int
        Number of ranks.
    """

    @property
    def optimizer(self) -> Any:
        """See above."""

    @property
    def n_ranks(self) -> int:
        """See above."""

    def key(self) -> Hashable:
        """Return what graphs depend on besides the optimizer, its model and arguments."""

    def why_not(self) -> str | None:
        """Return why these steps can never be recorded, or None."""

    def agree(self, wish: int) -> int:
        """Return the lowest wish of all ranks.

        It is at most `EAGER` if something else has to be settled between ranks in this step,
        unless it is `GIVE_UP`.
        """

    def reasons(self, reason: str | None) -> Mapping[int, str]:
        """Return the reasons of the ranks that have one."""

    def tell(self, message: str) -> None:
        """Warn the user, once for all ranks."""

    def eager(self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any) -> None:
        """Do the whole step, without graphs."""

    def gradients(
        self, lossfun: Callable[..., Any], args: Sequence[Any], kwds: Any, loss_scale: Any
    ) -> None:
        """Enqueue a step up to the update: forward, backward, exchange.

        The host neither waits for the GPU nor for other ranks, and changes only gradients:
        a graph may be recorded. ``loss_scale`` is None or an array without axes in GPU memory.
        The ranks exchange the gradients that they exchanged in the last eager step.
        """

    def launching(self) -> AbstractContextManager[Any]:
        """Return a context in which a graph does a step in place of `eager`."""
