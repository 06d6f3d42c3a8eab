"""Decide from the reports of ranks what is wrong with a job, without any input or output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from chainermn.failures.wait import Key, Wait

# How many stall limits a collective may take once all ranks have reached it: it may be large.
_LIMITS_IF_COMPLETE = 10
# How long ranks wait in calls that can never match: it is too late for the right one.
_SECONDS_IF_HOPELESS = 1.0
_MOST_LINES = 16

REMEDY = (
    "All ranks must make the same calls in the same order, the same number of times. ChainerMN "
    "looks for the cause after CHAINERMN_STALL_LIMIT seconds of waiting or silence, now "
    "{limit:g}, or sooner if calls can never match; 0 switches this off."
)


@dataclass
class RankState:
    """The state of a rank, as far as it is known; all times are on the clock of the `Judge`."""

    #: Rank in ``COMM_WORLD``.
    rank: int
    host: str
    pid: int
    #: Current calls of its main thread and of its other threads.
    main_wait: Wait | None = None
    other_waits: list[Wait] = field(default_factory=list)
    #: Number of calls that it has begun on each stream.
    counts: dict[str, int] = field(default_factory=dict)
    #: Current place of its main thread in the program.
    place: str = "an unknown place"
    #: Time at which its script ended.
    left_at: float | None = None
    #: Time of its last report.
    heard_at: float = 0.0

    @property
    def name(self) -> str:
        """Name for messages: rank and host."""
        return f"rank {self.rank} on {self.host}"

    @property
    def waits(self) -> list[Wait]:
        """Current calls of all threads."""
        return [*([self.main_wait] if self.main_wait else []), *self.other_waits]

    def has_come_to(self, wait: Wait) -> bool:
        """Tell whether this rank has begun its part of another rank's call."""
        for own in self.waits:
            if (own.stream, own.number) == (wait.stream, wait.number):
                return own.operation == wait.operation or own.is_message
        return self.counts.get(wait.stream, 0) >= wait.number


@dataclass(frozen=True)
class Verdict:
    """A problem, described for the user."""

    text: str
    #: Identifies the problem, so that the same warning is not repeated all the time.
    subject: str
    #: Whether the job must end.
    is_fatal: bool
    #: Host that is to blame; empty if none is.
    lost: str = ""


class Judge:
    """Finds out what is wrong.

    ``limit`` seconds of silence or waiting count as a failure; 0 means no limit.
    """

    def __init__(self, ranks: Iterable[RankState], now: float, limit: float) -> None:
        self._ranks = {state.rank: state for state in ranks}
        self._now = now
        self._limit = limit or float("inf")
        self._missing_by_call: dict[Key, list[RankState]] = {}
        self._remedy = REMEDY.format(limit=limit)

    def verdicts(self) -> list[Verdict]:
        """Return all problems, fatal ones first."""
        rules = (self._missed, self._silent, self._deadlocked, self._stalled, self._lingering)
        found = [verdict for rule in rules for verdict in rule()]
        return sorted(found, key=lambda verdict: not verdict.is_fatal)

    def _missed(self) -> Iterator[Verdict]:
        """Find calls that cannot end because a rank has left without making them."""
        if all(state.left_at is None for state in self._ranks.values()):
            return
        for wait in self._calls():
            missing = self._missing(wait)
            gone = _cut([state.name for state in missing if state.left_at is not None], ", ")
            if gone:
                yield self._fatal(
                    f"{gone} has ended its script, or called sys.exit, while others "
                    f"wait for it:\n{self._shown(wait)}{_advice(self._members(wait))}"
                )

    def _silent(self) -> Iterator[Verdict]:
        """Find ranks that no longer report."""
        for state in self._ranks.values():
            silence = self._now - state.heard_at
            if silence > self._limit:
                yield self._fatal(
                    f"{state.name} (process {state.pid}) has been silent for {silence:.0f} s: it "
                    "is stopped, or its host or the network is down. According to its last "
                    f"report, it {self._doing(state)}.{self._waited_for(state)}",
                    lost=state.host,
                )

    def _deadlocked(self) -> Iterator[Verdict]:
        """Find groups of ranks in which every rank waits for another of the group."""
        calls = {state.rank: wait for state in self._ranks.values() if (wait := state.main_wait)}
        hopeless, soon = self._hopeless(calls.values()), min(_SECONDS_IF_HOPELESS, self._limit)
        blocked = {
            rank: wait
            for rank, wait in calls.items()
            if self._now - wait.since > (soon if wait in hopeless else self._limit)
        }
        # Remove, call by call, the ranks that do not wait for any of the remaining ones.
        inside: defaultdict[Key, list[int]] = defaultdict(list)
        calls_without: defaultdict[int, list[Key]] = defaultdict(list)
        waited_for: dict[Key, set[int]] = {}
        for rank, wait in blocked.items():
            inside[wait.key].append(rank)
            if wait.key not in waited_for:
                missing = {member.rank for member in self._missing(wait)} & blocked.keys()
                waited_for[wait.key] = missing
                for member in missing:
                    calls_without[member].append(wait.key)
        free = [call for call, missing in waited_for.items() if not missing]
        while free:
            for rank in inside[free.pop()]:
                del blocked[rank]
                for call in calls_without[rank]:
                    waited_for[call].remove(rank)
                    if not waited_for[call]:
                        free.append(call)
        if blocked:
            # Of many ranks, those that are not where most are come first.
            states = [
                self._ranks[rank]
                for rank in sorted(blocked, key=lambda rank: len(inside[blocked[rank].key]))
            ]
            lines = [f"  {state.name} {self._doing(state)}" for state in states]
            advice = _advice(states)
            yield self._fatal(f"these ranks wait for each other:\n{_cut(lines)}{advice}")

    def _hopeless(self, calls: Collection[Wait]) -> set[Wait]:
        """Return calls on the same communicator, with the same number, that can never match."""
        if self._limit == float("inf"):
            return set()
        operations: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for wait in calls:
            operations[wait.stream, wait.number].add(wait.operation)
        return {
            wait
            for wait in calls
            if len(operations[wait.stream, wait.number]) > 1 and not wait.is_message
        }

    def _stalled(self) -> Iterator[Verdict]:
        """Find calls that take a long time, for any reason."""
        waiting = {
            state.rank
            for state in self._ranks.values()
            if state.main_wait and self._now - state.main_wait.since >= self._limit
        }
        for wait in self._calls():
            seconds = self._now - wait.since
            if seconds < self._limit:
                continue
            subject = f"{wait.stream} {wait.number}"
            missing = {member.rank for member in self._missing(wait)}
            if missing and missing <= waiting:
                continue  # the cause is the call in which the missing ranks wait
            text = f"all ranks have arrived, but the call does not end:\n{self._shown(wait)}"
            if missing:
                text = (
                    f"ranks have waited {seconds:.0f} s for others. If the others are meant to "
                    f"take this long, nothing is wrong.\n{self._shown(wait)}"
                )
                yield self._warning(text, subject)
            elif seconds < _LIMITS_IF_COMPLETE * self._limit:
                yield self._warning(text, subject)
            else:
                yield self._fatal(text)

    def _lingering(self) -> Iterator[Verdict]:
        """Find ranks that have ended and wait for the others to end."""
        here = [state for state in self._ranks.values() if state.left_at is None]
        for state in self._ranks.values():
            if here and state.left_at is not None and self._now - state.left_at > self._limit:
                lines = [f"  {other.name} {self._doing(other)}" for other in here]
                yield self._warning(
                    f"{state.name} ended its script {self._now - state.left_at:.0f} s ago. If the "
                    f"others are meant to take this long, nothing is wrong.\n{_cut(lines)}",
                    "lingering",
                )

    def _waited_for(self, state: RankState) -> str:
        """Describe the first call in which others wait for a rank, if there is one."""
        calls = [wait for wait in self._calls() if state in self._missing(wait)]
        first = min(calls, key=lambda wait: wait.since, default=None)
        return f"\n{self._shown(first)}" if first else ""

    def _calls(self) -> list[Wait]:
        """Return all calls in progress, each once, as made by the first rank."""
        calls: dict[Key, Wait] = {}
        for state in self._ranks.values():
            for wait in state.waits:
                first = calls.setdefault(wait.key, wait)
                if wait.since < first.since:
                    calls[wait.key] = wait
        return list(calls.values())

    def _members(self, wait: Wait) -> list[RankState]:
        return [
            self._ranks.get(rank) or RankState(rank, "a host that does not report", 0)
            for rank in wait.ranks
        ]

    def _missing(self, wait: Wait) -> list[RankState]:
        """Return the ranks that have not reached a call."""
        if wait.key not in self._missing_by_call:
            self._missing_by_call[wait.key] = [
                member for member in self._members(wait) if not member.has_come_to(wait)
            ]
        return self._missing_by_call[wait.key]

    def _shown(self, wait: Wait) -> str:
        missing = {member.rank for member in self._missing(wait)}
        lines = [
            f"    {'HAS NOT ' if member.rank in missing else 'has '}arrived: {member.name}, which "
            f"{self._doing(member)}"
            for member in sorted(self._members(wait), key=lambda m: m.rank not in missing)
        ]
        return f"  {wait.name}\n{_cut(lines)}"

    def _doing(self, state: RankState) -> str:
        if state.left_at is not None:
            return "has ended its script"
        if state.main_wait is None:
            return f"is at {state.place}"
        seconds = self._now - state.main_wait.since
        caller = state.main_wait.caller and f"called by {state.main_wait.caller}, "
        return f"has been in {state.main_wait.name} for {seconds:.1f} s, {caller}at {state.place}"

    def _fatal(self, text: str, lost: str = "") -> Verdict:
        return Verdict(f"{text}\n{self._remedy}", "", is_fatal=True, lost=lost)

    def _warning(self, text: str, subject: str) -> Verdict:
        return Verdict(f"{text}\n{self._remedy}", subject, is_fatal=False)


def _advice(states: Iterable[RankState]) -> str:
    """Return advice if only some of these ranks are in an extension."""
    callers = {state.main_wait.caller if state.main_wait else "" for state in states}
    if len(callers) == 1:
        return ""
    return (
        f"\nOnly some of these ranks are in {' and '.join(sorted(callers - {''}))}. An extension "
        "that communicates must be added to the trainers of all ranks, with the same trigger. If "
        "it is, the ranks have different numbers of batches: make them equal, as scatter_dataset "
        "does with force_equal_length=True, or use create_multi_node_optimizer(..., uneven=True)."
    )


def _cut(parts: list[str], separator: str = "\n") -> str:
    more = [f"  and {len(parts) - _MOST_LINES} more"] if len(parts) > _MOST_LINES else []
    return separator.join([*parts[:_MOST_LINES], *more])
