"""What this rank is doing: a mark around every call that needs other ranks.

The calls on a communicator are numbered. All its ranks make the same calls in the same order, so
the stream that a call belongs to and its number say which calls on other ranks it is to meet. The
messages from one rank to another are a stream of their own.

Calls that a script makes on ``communicator.mpi_comm`` itself, or on any other communicator of
mpi4py, have no mark: a rank that waits in one of them seems to compute. If another rank raises,
crashes or falls silent the job ends all the same. But if one has ended its script, or ranks wait
for each other there, that is only warned of.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from chainermn.failures.stack import Place, main_stack
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

    Parameters
    ----------
    function : callable
        Gets the frame of the call, in its thread; returns an empty text for nobody in particular.
    """
    global _caller_at
    _caller_at = function


class Group:
    """The ranks of a communicator, by their numbers in ``COMM_WORLD``.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
    """

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

    A context manager, as cheap as possible.

    Parameters
    ----------
    stream, operation, members : str
        See `Wait`.
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
            since = time.monotonic()
            _waits[self._thread] = Wait(stream, number, operation, members, since, caller)

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            del _waits[self._thread]


@contextlib.contextmanager
def waiting_for(thread: int) -> Iterator[None]:
    """Mark that this thread does nothing but wait for what another one of the process does.

    Parameters
    ----------
    thread : int
        The identifier of the other one.
    """
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
    """Mark the calls of a method that all ranks of ``self.group`` call. A decorator.

    Parameters
    ----------
    operation : str, optional
        The name that users know it by; that of the method by default.
    """
    if not isinstance(operation, str):
        return collective(operation.__name__)(operation)

    def mark(function: F) -> F:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            group: Group = self.group
            with waiting(group.stream, operation, group.members):
                return function(self, *args, **kwargs)

        return _as_marked(call)

    return mark


def sends(function: F) -> F:
    """Mark the calls of a method ``(self, message, dest, tag, where)``. A decorator.

    Parameters
    ----------
    function : callable
        ``where`` is the name that users know it by.
    """

    @functools.wraps(function)
    def send(self: Any, message: Any, dest: int, tag: int, where: str) -> None:
        group: Group = self.group
        if dest not in range(len(group.ranks)):
            function(self, message, dest, tag, where)  # which raises
            return
        peer = group.ranks[dest]
        stream = group.stream_of_messages(self.rank, dest)
        with waiting(stream, f"{where} to rank {peer}", as_ranges((group.rank, peer))):
            function(self, message, dest, tag, where)

    return _as_marked(send)


def receives(function: F) -> F:
    """Mark the calls of a method ``(self, source, tag, status, where)``. A decorator.

    Parameters
    ----------
    function : callable
        Fills in ``status``, an ``mpi4py.MPI.Status``; ``where`` is the name that users know it by.
    """

    @functools.wraps(function)
    def recv(self: Any, source: int, tag: int | None, status: Any, where: str) -> Any:
        group: Group = self.group
        if source not in range(len(group.ranks)):
            # From any rank: the sender is known only afterwards.
            received = function(self, source, tag, status, where)
            _counts[group.stream_of_messages(status.Get_source(), self.rank)] += 1
            return received
        peer = group.ranks[source]
        stream = group.stream_of_messages(source, self.rank)
        with waiting(stream, f"{where} from rank {peer}", as_ranges((group.rank, peer))):
            return function(self, source, tag, status, where)

    return _as_marked(recv)


def is_marked(method: object) -> bool:
    """Tell whether the calls of a method are marked."""
    return getattr(method, "_is_marked_for_watch", False)


def _as_marked(function: Callable[..., Any]) -> Any:
    function._is_marked_for_watch = True  # type: ignore[attr-defined]
    return function


def waits() -> list[tuple[Wait, bool]]:
    """Return the calls that are under way, and for each whether the main thread waits for it."""
    main = threading.main_thread().ident or 0
    main = _waiting_for.get(main, main)
    return [(wait, thread == main) for thread, wait in list(_waits.items())]


def counts() -> dict[str, int]:
    """Return how many calls this rank has begun, by stream."""
    return dict(_counts)


def place() -> str:
    """Return where the main thread is: in the user's code, and below it if that is elsewhere."""
    stack = main_stack()
    return ", inside of it ".join(dict.fromkeys(map(str, [*users_places(stack)[:1], *stack[:1]])))


def users_places(stack: Iterable[Place]) -> list[Place]:
    """Return those places of a stack that are in the user's code, not in that of a library."""
    return [place for place in stack if not place.file.startswith(_libraries())]


@functools.cache
def _libraries() -> tuple[str, ...]:
    # Who looks for the cause of a stall wants to see where these were called from.
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return str(Path(__file__).parent.parent), *map(sysconfig.get_path, names), "<"
