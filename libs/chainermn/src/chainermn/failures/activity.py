"""Record what this rank is doing: mark every call that needs other ranks.

The calls on a communicator are numbered. All its ranks make the same calls in the same order, so
a call's stream and number identify the calls on other ranks that it will meet. The messages from
one rank to another are a separate stream.

Calls that a script makes directly on ``communicator.mpi_comm``, or on another communicator of
mpi4py, have no mark: a rank that waits in one of them seems to compute. The job still ends if
another rank raises, crashes or falls silent. If a rank has ended its script, or if ranks wait for
each other in such calls, the user only gets a warning.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from chainermn import spans
from chainermn.failures.wait import MESSAGES, Wait, as_ranges

if TYPE_CHECKING:
    from mpi4py import MPI

F = TypeVar("F", bound="Callable[..., Any]")

# The current call of each thread, the threads that wait for another thread, and the number of
# calls begun on each stream.
_waits: dict[int, Wait] = {}
_waiting_for: dict[int, int] = {}
_counts: Counter[str] = Counter()
_groups: Counter[tuple[int, ...]] = Counter()

# Finds the part of the program that makes a call, given the call's frame.
_caller_at: Callable[[FrameType], str] | None = None


def name_callers_by(function: Callable[[FrameType], str]) -> None:
    """Use a function to find the part of the program that makes each call; see `Wait.caller`.

    The function gets the frame of the call, in its thread, and returns "" if it knows nothing.
    """
    global _caller_at
    _caller_at = function


class Group:
    """The ranks of a communicator, numbered as in ``COMM_WORLD``."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.ranks = world_ranks(mpi_comm)
        self.rank = self.ranks[mpi_comm.rank]
        self.members = as_ranges(self.ranks)
        _groups[self.ranks] += 1
        self.stream = f"communicator {_groups[self.ranks]} of ranks {self.members}"

    def stream_of_messages(self, source: int, dest: int) -> str:
        """Return the stream of messages between two ranks, numbered as in the communicator."""
        return f"{self.stream}{MESSAGES}{self.ranks[source]} to rank {self.ranks[dest]}"


def world_ranks(mpi_comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks' numbers in ``COMM_WORLD``; negative for ranks of another world."""
    from mpi4py import MPI

    group, world = mpi_comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return tuple(int(rank) for rank in ranks)


class MarkedCall:
    """Marks a call, unless it is inside another one: the user made only the outermost.

    A context manager, as cheap as possible. For the arguments, see `Wait`.
    """

    def __init__(self, stream: str, operation: str, members: str) -> None:
        self._call = stream, operation, members

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._is_outermost = self._thread not in _waits
        if self._is_outermost:
            stream, operation, members = self._call
            number = _counts[stream] = _counts[stream] + 1
            caller = _caller_at(sys._getframe(1)) if _caller_at else ""
            self._start = spans.now()
            since = self._start / 1e9
            _waits[self._thread] = Wait(stream, number, operation, members, since, caller)

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            wait = _waits.pop(self._thread)
            if spans.are_wanted():
                which = {"stream": wait.stream, "number": wait.number}
                spans.add(wait.operation, self._start, spans.now(), details=which)


@contextlib.contextmanager
def waiting_for(thread: int) -> Iterator[None]:
    """Mark that this thread only waits for another one, which is given by its identifier."""
    me = threading.get_ident()
    _waiting_for[me] = thread
    try:
        yield
    finally:
        del _waiting_for[me]


def creating(mpi_comm: MPI.Intracomm) -> MarkedCall:
    """Mark the creation of a communicator for these ranks."""
    ranks = as_ranges(world_ranks(mpi_comm))
    stream = f"the creation of communicators of ranks {ranks}"
    return MarkedCall(stream, "create_communicator", ranks)


def collective(operation: str | F) -> Any:
    """Mark the calls of a method that all ranks of ``self.group`` call.

    A decorator. Its argument, if there is one, is the name under which users know the method.
    """
    if not isinstance(operation, str):
        return collective(operation.__name__)(operation)

    def mark(function: F) -> F:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            group: Group = self.group
            with MarkedCall(group.stream, operation, group.members):
                return function(self, *args, **kwargs)

        return cast(F, call)

    return mark


def sends(function: F) -> F:
    """Mark the calls of a method ``(self, message, dest, tag, where)``.

    A decorator. ``where`` is the name under which users know the method.
    """

    @functools.wraps(function)
    def send(self: Any, message: Any, dest: int, tag: int, where: str) -> None:
        with _passing(self.group, self.rank, dest, f"{where} to", dest):
            function(self, message, dest, tag, where)

    return cast(F, send)


def receives(function: F) -> F:
    """Mark the calls of a method ``(self, source, tag, status, where)`` that fills in ``status``.

    A decorator. ``where`` is the name under which users know the method.
    """

    @functools.wraps(function)
    def recv(self: Any, source: int, tag: int | None, status: Any, where: str) -> Any:
        group: Group = self.group
        with _passing(group, source, self.rank, f"{where} from", source):
            received = function(self, source, tag, status, where)
        if source not in range(len(group.ranks)):  # from any rank, which is only known now
            _counts[group.stream_of_messages(status.Get_source(), self.rank)] += 1
        return received

    return cast(F, recv)


def _passing(
    group: Group, source: int, dest: int, what: str, peer: int
) -> contextlib.AbstractContextManager[None]:
    """Mark a message if the peer is a single rank of the group."""
    if peer not in range(len(group.ranks)):
        return contextlib.nullcontext()
    members = as_ranges((group.rank, group.ranks[peer]))
    stream = group.stream_of_messages(source, dest)
    return MarkedCall(stream, f"{what} rank {group.ranks[peer]}", members)


def waits() -> list[tuple[Wait, bool]]:
    """Return the calls in progress, each with whether the main thread waits for it."""
    main = threading.main_thread().ident or 0
    main = _waiting_for.get(main, main)
    return [(wait, thread == main) for thread, wait in list(_waits.items())]


def counts() -> dict[str, int]:
    """Return the number of calls that this rank has begun on each stream."""
    return dict(_counts)
