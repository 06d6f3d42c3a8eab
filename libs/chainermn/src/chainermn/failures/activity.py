"""What this rank is doing: a mark around every call that needs other ranks.

The calls on a communicator are numbered. All its ranks make the same calls in the same order, so
the stream that a call belongs to and its number say which calls on other ranks it is to meet. The
messages from one rank to another are a stream of their own.

Calls that a script makes on ``communicator.mpi_comm`` itself, or on any other communicator of
mpi4py, have no mark: a rank that waits in one of them seems to compute. If another rank raises,
crashes or falls silent, the job ends all the same. If one has ended its script, or ranks wait for
each other there, the user is only warned.
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

# The call of each thread; threads that wait for another one's call to end; and how many calls
# have begun, by stream.
_waits: dict[int, Wait] = {}
_waiting_for: dict[int, int] = {}
_counts: Counter[str] = Counter()
_groups: Counter[tuple[int, ...]] = Counter()

# Tells from the frame of a call what part of the program makes it.
_caller_at: Callable[[FrameType], str] | None = None


def name_callers_by(function: Callable[[FrameType], str]) -> None:
    """Have a function say on whose behalf each call is made; see `Wait.caller`.

    It gets the frame of the call, in its thread; it returns "" for nobody in particular.
    """
    global _caller_at
    _caller_at = function


class Group:
    """The ranks of a communicator, by their numbers in ``COMM_WORLD``."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.ranks = world_ranks(mpi_comm)
        self.rank = self.ranks[mpi_comm.rank]
        self.members = as_ranges(self.ranks)
        _groups[self.ranks] += 1
        self.stream = f"communicator {_groups[self.ranks]} of ranks {self.members}"

    def stream_of_messages(self, source: int, dest: int) -> str:
        """Return the stream of the messages from one rank, by its number there, to another."""
        return f"{self.stream}{MESSAGES}{self.ranks[source]} to rank {self.ranks[dest]}"


def world_ranks(mpi_comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the numbers in ``COMM_WORLD`` of the ranks; negative for those of another world."""
    from mpi4py import MPI

    group, world = mpi_comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return tuple(int(rank) for rank in ranks)


class waiting:
    """Mark a call, unless it is made inside of another one: the user made the outermost.

    A context manager, as cheap as possible. For the arguments see `Wait`.
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
    """Mark that this thread does nothing except wait for another one, given its identifier."""
    me = threading.get_ident()
    _waiting_for[me] = thread
    try:
        yield
    finally:
        del _waiting_for[me]


def creating(mpi_comm: MPI.Intracomm) -> waiting:
    """Mark the creation of a communicator of these ranks."""
    ranks = as_ranges(world_ranks(mpi_comm))
    return waiting(f"the creation of communicators of ranks {ranks}", "create_communicator", ranks)


def collective(operation: str | F) -> Any:
    """Mark the calls of a method that all ranks of ``self.group`` call.

    A decorator. Its argument, if any, is the name that users know the method by.
    """
    if not isinstance(operation, str):
        return collective(operation.__name__)(operation)

    def mark(function: F) -> F:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            group: Group = self.group
            with waiting(group.stream, operation, group.members):
                return function(self, *args, **kwargs)

        return cast(F, call)

    return mark


def sends(function: F) -> F:
    """Mark the calls of a method ``(self, message, dest, tag, where)``.

    A decorator. ``where`` is the name that users know the method by.
    """

    @functools.wraps(function)
    def send(self: Any, message: Any, dest: int, tag: int, where: str) -> None:
        with _passing(self.group, self.rank, dest, f"{where} to", dest):
            function(self, message, dest, tag, where)

    return cast(F, send)


def receives(function: F) -> F:
    """Mark the calls of a method ``(self, source, tag, status, where)`` that fills in ``status``.

    A decorator. ``where`` is the name that users know the method by.
    """

    @functools.wraps(function)
    def recv(self: Any, source: int, tag: int | None, status: Any, where: str) -> Any:
        group: Group = self.group
        with _passing(group, source, self.rank, f"{where} from", source):
            received = function(self, source, tag, status, where)
        if source not in range(len(group.ranks)):  # any rank: the sender is known only now
            _counts[group.stream_of_messages(status.Get_source(), self.rank)] += 1
        return received

    return cast(F, recv)


def _passing(
    group: Group, source: int, dest: int, what: str, peer: int
) -> contextlib.AbstractContextManager[None]:
    """Mark a message, unless the peer is no single rank of the group."""
    if peer not in range(len(group.ranks)):
        return contextlib.nullcontext()
    members = as_ranges((group.rank, group.ranks[peer]))
    stream = group.stream_of_messages(source, dest)
    return waiting(stream, f"{what} rank {group.ranks[peer]}", members)


def waits() -> list[tuple[Wait, bool]]:
    """Return the calls that are under way, and for each whether the main thread waits for it."""
    main = threading.main_thread().ident or 0
    main = _waiting_for.get(main, main)
    return [(wait, thread == main) for thread, wait in list(_waits.items())]


def counts() -> dict[str, int]:
    """Return how many calls this rank has begun, by stream."""
    return dict(_counts)
