"""Steps that all ranks make together: what fails on one of them raises on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

T = TypeVar("T")

# The exceptions that mean the same on a rank that only hears of them.
_PORTABLE = (TypeError, ValueError, IndexError, KeyError)


def run_together(comm: CommunicatorBase, where: str, act: Callable[[], T]) -> T:
    """Return ``act()`` of this rank, or raise on every rank if it raises on any.

    Collective: without it, a rank that raises leaves the others waiting for it.

    Parameters
    ----------
    comm : CommunicatorBase
    where : str
        What the user called, for the message.
    act : callable
        Must not communicate.

    Raises
    ------
    Exception
        Where ``act`` raised, that exception; on the other ranks one of the same type if that is
        TypeError, ValueError, IndexError or KeyError, else RuntimeError, with the same message.
    """
    raised: Exception | None = None
    try:
        result = act()
    except Exception as error:
        raised = error
    reports = comm.allgather_obj(None if raised is None else (_kind(raised), _text(raised)))
    if raised is not None:
        raised.add_note(f"({where}, rank {comm.rank}; all ranks raise)")
        raise raised
    for rank, report in enumerate(reports):
        if report is not None:
            kind, text = report
            raise kind(f"{where}: rank {rank} failed: {text}")
    return result


def check_root(comm: CommunicatorBase, root: int, where: str) -> None:
    """Raise on all ranks unless all give the same number of a rank.

    Raises
    ------
    ValueError
    """
    roots = comm.allgather_obj(root)
    if any(other != roots[0] for other in roots):
        raise ValueError(f"{where}: all ranks must give the same root, got {roots}, by rank")
    if root not in range(comm.size):
        raise ValueError(f"{where}: the root must be a rank, 0 to {comm.size - 1}, got {root}")


def _kind(error: Exception) -> type[Exception]:
    return next((kind for kind in _PORTABLE if type(error) is kind), RuntimeError)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
