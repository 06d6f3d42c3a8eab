"""Hold a communicator in a link."""

from __future__ import annotations

from typing import Any

from chainermn.communicators.communicator_base import CommunicatorBase


class SharedCommunicator:
    """Holds a communicator, which deep copies share and pickles leave out."""

    def __init__(self, comm: CommunicatorBase | None = None) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCommunicator:
        return self

    def __reduce__(self) -> tuple[type[SharedCommunicator], tuple[()]]:
        return SharedCommunicator, ()


class CommunicatorHolder:
    """Mixin for links that have the attribute ``comm``."""

    _shared = SharedCommunicator()

    @property
    def comm(self) -> CommunicatorBase:
        """The communicator, which copies of the link share. Unpickled links have none."""
        if self._shared.comm is None:
            raise RuntimeError(
                "this link has no communicator, because it was unpickled; assign one to its "
                "attribute `comm`"
            )
        return self._shared.comm

    @comm.setter
    def comm(self, comm: CommunicatorBase) -> None:
        self._shared = SharedCommunicator(comm)
