"""Duplicates of an MPI communicator, for what runs beside the use of the communicator itself.

MPI has room for a few thousand communicators. Freeing one is collective, but the ranks do not
notice at the same time that nobody needs it any longer, for example when Python collects garbage.
So the duplicates that all ranks have given back are freed when the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI


class Freeable(Protocol):
    """Something that is made on a communicator."""

    def free(self) -> None:
        """Release what it holds. Collective."""


T = TypeVar("T", bound=Freeable)

# In the order in which they were made. Among those of one communicator it is the same on all
# ranks.
_duplicates: list[Duplicate[Any]] = []


class Duplicate(Generic[T]):
    """Something that has a duplicate of a communicator for itself. Making one is collective.

    Parameters
    ----------
    original : mpi4py.MPI.Intracomm
    make : callable
        Returns what is to have the duplicate.

    Attributes
    ----------
    made : object
        What ``make`` has returned.
    """

    def __init__(self, original: MPI.Intracomm, make: Callable[[MPI.Intracomm], T]) -> None:
        _free_returned(original)
        self._original = original
        self._mpi_comm = original.Dup()
        self._is_returned = False
        self.made = make(self._mpi_comm)
        _duplicates.append(self)

    def give_back(self) -> None:
        """End its use on this rank. Not collective."""
        self._is_returned = True

    def _free(self) -> None:
        self.made.free()
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
