"""Checks after which all ranks continue, or all ranks raise.

If an error stops only one rank, the others wait for it in their next collective call. So each
rank first tells all others whether it has an error.

Every function here is collective, unless it says otherwise. ``ranks`` is a communicator of
chainermn or of mpi4py.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from chainermn.files import WRONG_INPUT

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

__all__ = ["check_equal", "check_root", "exit_together", "run_on_root", "run_together"]

T = TypeVar("T")

# Exceptions that mean the same on a rank that did not raise them itself.
_PORTABLE = (TypeError, ValueError, IndexError, KeyError)


class Ranks(Protocol):
    """A communicator; the names of mpi4py's methods lack the suffix ``_obj``."""

    @property
    def rank(self) -> int:
        """Number of this process among all ranks, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""


def run_together(ranks: Ranks, where: str, act: Callable[[], T]) -> T:
    """Call a function on every rank; if it raises on any rank, raise on all ranks.

    Parameters
    ----------
    ranks : CommunicatorBase
        Communicator of the ranks that call it.
    where : str
        Short description of the step, for error messages.
    act : callable
        Function without arguments. It must not communicate.

    Returns
    -------
    object
        The result of ``act()`` on this rank.

    Raises
    ------
    Exception
        On ranks where ``act`` raises, its exception. On other ranks, an exception with the same
        message: of the same type if that is TypeError, ValueError, IndexError or KeyError,
        otherwise RuntimeError.

    Examples
    --------
    >>> from chainermn.agreement import run_together
    >>> run_together(comm, "reading the size", lambda: int("32"))
    32
    >>> text = "32" if comm.rank == 0 else "many"
    >>> run_together(comm, "reading the size", lambda: int(text))
    Traceback (most recent call last):
        ...
    ValueError: reading the size: rank 1: ValueError: invalid literal for int() ...
    (reading the size, rank 1; all ranks raise)
    """
    result, raised = _try(act)
    reports = _method(ranks, "allgather")(_report(raised))
    _raise_together(ranks, where, raised, dict(enumerate(reports)))
    return result


def run_on_root(ranks: Ranks, root: int, where: str, act: Callable[[], T]) -> T:
    """Call a function on the root and return its result on all ranks; if it raises, all raise.

    Parameters
    ----------
    ranks : CommunicatorBase
        Communicator of the ranks that call it.
    root : int
        Rank that calls ``act``; the same on every rank.
    where : str
        Short description of the step, for error messages.
    act : callable
        Function without arguments, whose result can be pickled. It must not communicate.

    Returns
    -------
    object
        The result of ``act()`` on the root.

    Raises
    ------
    Exception
        On every rank, if ``act`` raises, as for `run_together`.

    Examples
    --------
    Read a file once, and use its contents on every rank:

    >>> from pathlib import Path
    >>> from chainermn.agreement import run_on_root
    >>> if comm.rank == 0:
    ...     length = Path("classes.txt").write_text("cat dog")
    >>> run_on_root(comm, 0, "reading", lambda: Path("classes.txt").read_text().split())
    ['cat', 'dog']
    """
    result, raised = _try(act) if ranks.rank == root else (None, None)
    result, report = _method(ranks, "bcast")((result, _report(raised)), root=root)
    _raise_together(ranks, where, raised, {root: report})
    return result


@contextlib.contextmanager
def exit_together(ranks: Ranks) -> Iterator[None]:
    """End the program on all ranks with a one-line message if the ``with`` block fails on any.

    Use it in scripts, around steps that fail because of wrong input, such as a misspelled file
    name: users then see one line instead of tracebacks. Every rank must reach the end of the
    block. So the block must not communicate, except with functions that raise on all ranks or
    on none, such as `run_on_root`.

    Parameters
    ----------
    ranks : CommunicatorBase
        Communicator of all ranks of the program.

    Raises
    ------
    SystemExit
        On all ranks, if the block raises ImportError, OSError, RuntimeError or ValueError on any
        rank, or if a function of this module raises in it. Rank 0 prints ``error:`` and the
        message of the lowest rank that has one.

    Examples
    --------
    Rank 0 prints the message; the exit code is 1 on every rank:

    >>> from chainermn.agreement import exit_together
    >>> with exit_together(comm):
    ...     if not 0.0 < float("7") < 1.0:
    ...         raise ValueError("--dropout must be between 0 and 1, got 7")
    Traceback (most recent call last):
        ...
    SystemExit: error: --dropout must be between 0 and 1, got 7
    SystemExit: 1
    """
    message = None
    try:
        yield
    except Exception as error:
        is_of_all = getattr(error, "raised_on_all_ranks", False)
        if not (is_of_all or isinstance(error, WRONG_INPUT)):
            raise
        message = str(error) or repr(error)
    messages = _method(ranks, "allgather")(message)
    found = next((message for message in messages if message is not None), None)
    if found is not None:
        raise SystemExit(f"error: {found}" if ranks.rank == 0 else 1)


def check_equal(ranks: Ranks, value: object, where: str) -> None:
    """Raise on all ranks unless all ranks pass the same value.

    Parameters
    ----------
    ranks : CommunicatorBase
        Communicator of the ranks that call it.
    value : object
        Value to compare; anything that can be pickled. Values count as equal if their ``repr`` is
        equal.
    where : str
        Short description of the step, for error messages.

    Raises
    ------
    ValueError
        On every rank, if the values differ.

    Examples
    --------
    >>> from chainermn.agreement import check_equal
    >>> check_equal(comm, 32, "batch size")
    >>> check_equal(comm, 32 + comm.rank, "batch size")
    Traceback (most recent call last):
        ...
    ValueError: batch size: the ranks disagree, but all must give the same. rank 0: 32; rank 1: 33
    """
    if not hasattr(ranks, "allgather_obj"):  # mpi4py's: take the fast path if all is well
        is_agreed, _ = agree(ranks, repr(value), ())  # type: ignore[arg-type]
        if is_agreed and not isinstance(value, InputError):
            return
    everywhere = _method(ranks, "allgather")(value)
    raise_errors_of(dict(enumerate(everywhere)), where)
    if len({repr(each) for each in everywhere}) > 1:
        raise_disagreement(everywhere, where)


def check_root(ranks: Ranks, root: int, where: str) -> None:
    """Raise on all ranks unless all ranks pass the same root, and it is a rank.

    Parameters
    ----------
    ranks : CommunicatorBase
        Communicator of the ranks that call it.
    root : int
        Number to check.
    where : str
        Short description of the step, for error messages.

    Raises
    ------
    ValueError
        On every rank, if ``root`` is not a rank, or differs between ranks.

    Examples
    --------
    >>> from chainermn.agreement import check_root
    >>> check_root(comm, 1, "my_broadcast")
    >>> check_root(comm, 2, "my_broadcast")
    Traceback (most recent call last):
        ...
    ValueError: my_broadcast: rank 0: root must be a rank, 0 to 1, got 2
    """

    def describe() -> str:
        if root not in range(ranks.size):
            raise ValueError(f"root must be a rank, 0 to {ranks.size - 1}, got {root!r}")
        return f"root={root}"

    check_equal(ranks, attempt(describe), where)


@dataclass(frozen=True)
class InputError:
    """An error that a rank sends instead of its data."""

    kind: type[Exception]
    message: str


def attempt(make: Callable[[], T]) -> T | InputError:
    """Return ``make()``, or an `InputError` if it raises an exception. Not collective."""
    try:
        return make()
    except Exception as error:
        kind = type(error) if type(error) in (TypeError, ValueError, IndexError) else TypeError
        return InputError(kind, str(error) or repr(error))


def raise_errors_of(parts: Mapping[int, Any], where: str) -> None:
    """Raise the first `InputError` in what the ranks have sent, by rank. Not collective.

    ``parts`` must be the same on every rank.
    """
    for rank, part in parts.items():
        if isinstance(part, InputError):
            raise part.kind(f"{where}: rank {rank}: {part.message}")


def raise_disagreement(everywhere: Sequence[object], where: str) -> NoReturn:
    """Raise because ranks gave different values; ``everywhere`` has one entry per rank."""
    shown = "; ".join(f"rank {rank}: {part}" for rank, part in enumerate(everywhere))
    raise ValueError(f"{where}: the ranks disagree, but all must give the same. {shown}")


def pack(description: Hashable, integers: Sequence[int]) -> NDArray[np.int64]:
    """Return integers whose maxima over the ranks `unpack` understands. Not collective.

    Descriptions are compared by their ``repr``, whose digests are cached, so a long one that
    seldom changes costs little. Every rank passes the same number of integers.
    """
    digest = _digest(description)
    return np.array([digest, -digest, *integers], np.int64)


def unpack(maxima: NDArray[np.int64]) -> tuple[bool, Sequence[int]]:
    """Tell whether a description is the same on every rank, and the maxima of the integers."""
    largest, negated, *integers = maxima.tolist()
    return largest == -negated, integers


def agree(
    mpi_comm: MPI.Intracomm, description: Hashable, integers: Sequence[int]
) -> tuple[bool, Sequence[int]]:
    """Return what `unpack` tells about the descriptions and integers of all ranks.

    This takes one small all-reduce.
    """
    from mpi4py import MPI  # `load_mpi` would take half as long as the rest of this function

    packed = pack(description, integers)
    mpi_comm.Allreduce(MPI.IN_PLACE, packed, MPI.MAX)
    return unpack(packed)


def any_true(mpi_comm: MPI.Intracomm, flag: bool) -> bool:
    """Tell whether ``flag`` is true on any rank. One small all-reduce."""
    _, (is_true,) = agree(mpi_comm, None, (flag,))
    return bool(is_true)


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
