"""Duplicates of a communicator, for what runs beside the use of the communicator itself.

MPI has room for some thousand communicators. They are freed by a collective call, but the ranks
do not notice at the same time that nobody needs one any longer, for example when Python collects
garbage. So those that all ranks have given back are freed when the next one is borrowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

C = TypeVar("C", bound="CommunicatorBase")

# In the order in which they were made, which among those of a communicator is that of all ranks.
_loans: list[Loan[Any]] = []


class Loan(Generic[C]):
    """A duplicate of a communicator that its borrower has for itself.

    Attributes
    ----------
    communicator : CommunicatorBase
        With the ranks, hosts and settings of the original.
    """

    def __init__(self, original: C) -> None:
        self.lender = original.mpi_comm
        self.communicator = original.split(0, original.rank)
        self.is_over = False


def borrow(communicator: C) -> Loan[C]:
    """Duplicate a communicator. Collective."""
    lent = [loan for loan in _loans if loan.lender is communicator.mpi_comm]
    over = {number for number, loan in enumerate(lent) if loan.is_over}
    if lent:
        over.intersection_update(*communicator.allgather_obj(over))
    for number in sorted(over):
        lent[number].communicator.finalize()
        _loans.remove(lent[number])
    loan = Loan(communicator)
    _loans.append(loan)
    return loan


def give_back(*loans: Loan[Any]) -> None:
    """End the use of duplicates. Not collective."""
    for loan in loans:
        loan.is_over = True
