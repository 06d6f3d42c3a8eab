"""Duplicate an MPI communicator, for work that runs concurrently with other uses of it.

MPI has room for a few thousand communicators, and freeing one is collective. But ranks do not drop
a duplicate at the same time, since Python may collect garbage at any time. So creating a duplicate
first frees those that all ranks have given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")

# In order of creation, which is the same on all ranks for duplicates of the same communicator.
_duplicates: list[Duplicate[Any]] = []


class Duplicate(Generic[T]):
    """An object with a private duplicate of a communicator. Creating one is collective.

    ``make`` takes the duplicate of ``original`` and returns the object, which becomes `made`.
    ``free`` releases everything that the object has except the communicator, and is collective.
    """

    def __init__(
        self,
        original: MPI.Intracomm,
        make: Callable[[MPI.Intracomm], T],
        free: Callable[[T], None] | None,
    ) -> None:
        _free_returned(original)
        self._original, self._free_made = original, free
        self._mpi_comm = original.Dup()
        self._is_returned = False
        self.made = make(self._mpi_comm)
        _duplicates.append(self)

    def give_back(self) -> None:
        """Declare that this rank no longer uses the duplicate. Not collective."""
        self._is_returned = True

    def _free(self) -> None:
        if self._free_made is not None:
            self._free_made(self.made)
        self._mpi_comm.Free()
        _duplicates.remove(self)


def _free_returned(original: MPI.Intracomm) -> None:
    """Free the duplicates that all ranks have given back. Collective."""
    existing = [each for each in _duplicates if each._original is original]
    if not existing:
        return
    returned = {number for number, each in enumerate(existing) if each._is_returned}
    returned.intersection_update(*original.allgather(returned))
    for number in sorted(returned):
        existing[number]._free()
