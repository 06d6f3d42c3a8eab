"""Let a rank that has finished an epoch join the steps of ranks that have more batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import chainer

    from chainermn.communicators.communicator_base import CommunicatorBase


class Join:
    """The ranks that have finished the epoch, as far as all ranks know.

    Attributes
    ----------
    has_joined : bool
        Whether this rank has finished it, and others have not.
    is_news : bool
        Whether this rank has finished it, and the others do not know yet.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator
        self._n_training = communicator.size
        self.has_joined = self.is_news = False

    def finish(self) -> None:
        """Finish the epoch on this rank."""
        self.has_joined = self.is_news = True

    def agree(self) -> bool:
        """Ask all ranks, and tell whether all have finished the epoch. Collective."""
        self._n_training = self._communicator.allgather_obj(self.has_joined).count(False)
        self.is_news = False
        if self._n_training:
            return False
        self._n_training, self.has_joined = self._communicator.size, False
        return True

    def weigh(self, parameters: Iterable[chainer.Parameter]) -> None:
        """Turn means over all ranks into means over those that still have batches."""
        if self._n_training < self._communicator.size:
            for parameter in parameters:
                parameter.grad *= self._communicator.size / self._n_training
