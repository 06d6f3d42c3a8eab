"""Hold a communicator in a link."""

from __future__ import annotations

from typing import Any

from chainermn.communicators.communicator_base import CommunicatorBase


class SharedCommunicator:
    """Holds a communicator, which copies share and pickling leaves out.

    Parameters
    ----------
    comm : CommunicatorBase, optional
    """

    def __init__(self, comm: CommunicatorBase | None = None) -> None:
        self._comm = comm

    def get(self) -> CommunicatorBase:
        """Return the communicator.

        Raises
        ------
        RuntimeError
            If the holder was unpickled.
        """
        if self._comm is None:
            raise RuntimeError(
                "this link has no communicator, since it was unpickled; assign one to its "
                "attribute `comm`"
            )
        return self._comm

    def __copy__(self) -> SharedCommunicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCommunicator:
        return self

    def __reduce__(self) -> tuple[type[SharedCommunicator], tuple[()]]:
        return SharedCommunicator, ()


class CommunicatorHolder:
    """Mixin that gives links the attribute ``comm``."""

    _shared = SharedCommunicator()

    @property
    def comm(self) -> CommunicatorBase:
        """The communicator, which copies of the link share; unpickled links have none."""
        return self._shared.get()

    @comm.setter
    def comm(self, comm: CommunicatorBase) -> None:
        self._shared = SharedCommunicator(comm)
