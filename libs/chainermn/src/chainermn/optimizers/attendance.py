"""Know which ranks still have batches in an epoch, if ranks have different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase


class Attendance:
    """The ranks that have finished the epoch, as far as all ranks know.

    Attributes
    ----------
    is_absent : bool
        Whether this rank has finished it, and others have not.
    has_news : bool
        Whether this rank has finished it, and the others do not know yet.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator
        self._n_present = communicator.size
        self.is_absent = self.has_news = False

    @property
    def weight(self) -> float:
        """Factor that turns a mean over all ranks into a mean over those that are present."""
        return self._communicator.size / self._n_present

    def leave(self) -> None:
        """Finish the epoch on this rank."""
        self.is_absent = self.has_news = True

    def agree(self) -> bool:
        """Ask all ranks, and tell whether all have finished the epoch. Collective."""
        self._n_present = self._communicator.allgather_obj(self.is_absent).count(False)
        self.has_news = False
        if self._n_present:
            return False
        self._n_present, self.is_absent = self._communicator.size, False
        return True
