"""Checks that all ranks make together: either all go on, or all raise.

A check that only one rank makes, and fails, leaves the others waiting for it in the next
collective. So each rank first tells all the others what it has found.

Every function here is collective, unless it says otherwise. ``ranks`` is a communicator of
chainermn or of mpi4py.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

__all__ = ["check_equal", "check_root", "exit_together", "run_on_root", "run_together"]

T = TypeVar("T")

#: Replaces integers by their maxima over the ranks.
Maximum: TypeAlias = "Callable[[NDArray[np.int64]], object]"

# The exceptions that mean the same on a rank that only hears of them.
_PORTABLE = (TypeError, ValueError, IndexError, KeyError)

# Kept alive, because MPI may still write to the memory of an all-reduce that is not over.
_unfinished: list[tuple[Any, Any]] = []


class Ranks(Protocol):
    """What is asked of a communicator; one of mpi4py lacks ``_obj`` in the names of methods."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""


def run_together(ranks: Ranks, where: str, act: Callable[[], T]) -> T:
    """Return ``act()`` of this rank, or raise on every rank if it raises on any.

    Parameters
    ----------
    ranks : CommunicatorBase
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
    result, raised = _try(act)
    reports = _method(ranks, "allgather")(_report(raised))
    _raise_together(ranks, where, raised, dict(enumerate(reports)))
    return result


def run_on_root(ranks: Ranks, root: int, where: str, act: Callable[[], T]) -> T:
    """Return, on every rank, ``act()`` of the root, or raise on every rank if it raises there.

    Parameters
    ----------
    ranks : CommunicatorBase
    root : int
        The only rank that calls ``act``; the same on every rank.
    where : str
        What the user called, for the message.
    act : callable
        Must not communicate. Returns anything that can be pickled.

    Raises
    ------
    Exception
        As for `run_together`.
    """
    result, raised = _try(act) if ranks.rank == root else (None, None)
    result, report = _method(ranks, "bcast")((result, _report(raised)), root=root)
    _raise_together(ranks, where, raised, {root: report})
    return result


@contextlib.contextmanager
def exit_together(ranks: Ranks) -> Iterator[None]:
    """End the program on all ranks, with one line, if the body fails on any because of its input.

    For scripts: their user has misspelt the name of a file and needs no tracebacks. Every rank
    must leave the body, so on each rank it either does not communicate, or only with functions
    such as `run_on_root`, which raise on all ranks or on none.

    Parameters
    ----------
    ranks : CommunicatorBase

    Raises
    ------
    SystemExit
        On all ranks, if the body raises ImportError, OSError, RuntimeError or ValueError on any,
        or whatever the functions of this module raise on all ranks. Rank 0 prints ``error:`` and
        the message, of the lowest rank that has one.
    """
    message = None
    try:
        yield
    except Exception as error:
        is_of_all = getattr(error, "raised_on_all_ranks", False)
        if not (is_of_all or isinstance(error, (ImportError, OSError, RuntimeError, ValueError))):
            raise
        message = str(error) or repr(error)
    messages = _method(ranks, "allgather")(message)
    found = next((message for message in messages if message is not None), None)
    if found is not None:
        raise SystemExit(f"error: {found}" if ranks.rank == 0 else 1)


def check_equal(ranks: Ranks, value: object, where: str) -> None:
    """Raise on all ranks unless all give the same value.

    Parameters
    ----------
    ranks : CommunicatorBase
    value : object
        Anything that can be pickled. Values are equal if their ``repr`` is.
    where : str
        What the user called, for the message.

    Raises
    ------
    ValueError
        If the ranks differ.
    TypeError, ValueError, IndexError
        If the value of a rank is an ``InputError``.
    """
    if not hasattr(ranks, "allgather_obj"):  # one of mpi4py's: the quick way, if nothing is wrong
        is_agreed, _ = agree(ranks, repr(value), ())  # type: ignore[arg-type]
        if is_agreed and not isinstance(value, InputError):
            return
    everywhere = _method(ranks, "allgather")(value)
    raise_errors_of(dict(enumerate(everywhere)), where)
    if len({repr(each) for each in everywhere}) > 1:
        raise_disagreement(everywhere, where)


def check_root(ranks: Ranks, root: int, where: str) -> None:
    """Raise on all ranks unless all give the same root, which is a rank.

    Parameters
    ----------
    ranks : CommunicatorBase
    root : int
    where : str
        What the user called, for the message.

    Raises
    ------
    ValueError
    """

    def describe() -> str:
        if root not in range(ranks.size):
            raise ValueError(f"root must be a rank, 0 to {ranks.size - 1}, got {root!r}")
        return f"root={root}"

    check_equal(ranks, attempt(describe), where)


@dataclass(frozen=True)
class InputError:
    """An error that a rank sends in place of its data."""

    kind: type[Exception]
    message: str


def attempt(make: Callable[[], T]) -> T | InputError:
    """Return ``make()``, or an `InputError` for the exception that it raises. Not collective."""
    try:
        return make()
    except Exception as error:
        kind = type(error) if type(error) in (TypeError, ValueError, IndexError) else TypeError
        return InputError(kind, str(error) or repr(error))


def raise_errors_of(parts: Mapping[int, Any], where: str) -> None:
    """Raise the first `InputError` among what ranks have sent, by rank. Not collective.

    ``parts`` must be the same on every rank.
    """
    for rank, part in parts.items():
        if isinstance(part, InputError):
            raise part.kind(f"{where}: rank {rank}: {part.message}")


def raise_disagreement(everywhere: Sequence[object], where: str) -> NoReturn:
    """Raise the error of ranks that should have given the same; ``everywhere`` is by rank."""
    shown = "; ".join(f"rank {rank}: {part}" for rank, part in enumerate(everywhere))
    raise ValueError(f"{where}: the ranks disagree, but all must give the same. {shown}")


def agree(
    mpi_comm: MPI.Intracomm,
    description: Hashable,
    flags: Sequence[bool],
    maximum: Maximum | None = None,
) -> tuple[bool, tuple[bool, ...]]:
    """Tell whether a description is the same on every rank, and which flags are true on any.

    One small all-reduce. Descriptions are compared by their ``repr``, and remembered, so that a
    long one that seldom changes costs little. Every rank gives as many flags. ``maximum`` does the
    all-reduce; by default, MPI's blocking one does.
    """
    from mpi4py import MPI  # not `load_mpi`, which takes half as long as the rest

    digest = _digest(description)
    result = np.array([digest, -digest, *flags], np.int64)
    if maximum is None:
        mpi_comm.Allreduce(MPI.IN_PLACE, result, MPI.MAX)
    else:
        maximum(result)
    largest, negated, *found = result.tolist()
    return largest == -negated, tuple(map(bool, found))


def maximum_by(mpi_comm: MPI.Intracomm, wait: Callable[[MPI.Request], object]) -> Maximum:
    """Return an all-reduce for `agree` during which ``wait`` may do other things."""
    from mpi4py import MPI

    def maximum(integers: NDArray[np.int64]) -> None:
        request = mpi_comm.Iallreduce(MPI.IN_PLACE, integers, MPI.MAX)
        try:
            wait(request)
        except BaseException:
            _unfinished.append((request, integers))
            raise

    return maximum


def any_true(mpi_comm: MPI.Intracomm, flag: bool) -> bool:
    """Tell whether ``flag`` is true on any rank. One small all-reduce."""
    _, (found,) = agree(mpi_comm, None, (flag,))
    return found


@functools.lru_cache(16)
def _digest(description: Hashable) -> int:
    return zlib.crc32(repr(description).encode())


def _method(ranks: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(ranks, f"{name}_obj", None) or getattr(ranks, name)
    return method


def _try(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _report(raised: Exception | None) -> InputError | None:
    if raised is None:
        return None
    kind = type(raised) if type(raised) in _PORTABLE else RuntimeError
    return InputError(kind, f"{type(raised).__name__}: {raised}")


def _raise_together(
    ranks: Ranks, where: str, raised: Exception | None, reports: Mapping[int, object]
) -> None:
    if raised is not None:
        raised.add_note(f"({where}, rank {ranks.rank}; all ranks raise)")
        raise _marked(raised)
    try:
        raise_errors_of(reports, where)
    except Exception as error:
        raise _marked(error) from None


def _marked(error: Exception) -> Exception:
    error.raised_on_all_ranks = True  # type: ignore[attr-defined]
    return error
