"""Sums over the spans of all ranks, while training goes on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from chainermn import spans
from chainermn.spans import Span
from chainermn.timeline.clocks import Clock
from chainermn.timeline.iterations import Iteration, divide, kind_of
from chainermn.timeline.peers import Peers
from chainermn.timeline.summary import Summary, summarize

if TYPE_CHECKING:
    from mpi4py import MPI

#: A rank keeps its latest iterations since the last report, with at most so many calls: a few
#: megabytes.
MOST_ITERATIONS, MOST_CALLS = 2000, 10_000


class Gathering:
    """Listens to the spans of this rank, and sums them up iteration by iteration."""

    def __init__(self) -> None:
        self._pending: list[Span] = []
        self._iterations: deque[Iteration] = deque()
        self._n_calls = 0
        # Up to where time has been given to an iteration.
        self._reached: int | None = None

    def __call__(self, span: Span) -> None:
        """Take a span."""
        if span.track != spans.MAIN:
            return
        if span.name == "iteration":
            # What is left of one of which most has been taken belongs to the next.
            if self._reached is None or span.start >= self._reached:
                self._close(span.start, span.end)
        elif kind_of(span, ""):
            self._pending.append(span)

    def take(self) -> list[Iteration]:
        """Return what was gathered since this was called last, up to now."""
        if self._pending:
            self._close(min(span.start for span in self._pending), spans.now())
        taken = list(self._iterations)
        self._iterations.clear()
        self._n_calls = 0
        return taken

    def _close(self, start: int, end: int) -> None:
        start = start if self._reached is None else self._reached
        self._iterations.append(divide(start, end, self._pending))
        self._n_calls += len(self._iterations[-1].calls)
        while len(self._iterations) > MOST_ITERATIONS or self._n_calls > MOST_CALLS:
            self._n_calls -= len(self._iterations.popleft().calls)
        self._pending.clear()
        self._reached = end


class SharedGathering:
    """Sums up the spans of a communicator's ranks. Making one is collective."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._peers = Peers(mpi_comm)
        self._start = self._peers.offset()
        self._own = Gathering()
        spans.listen(self._own)

    def take(self) -> Summary | None:
        """Return the summary of the time since this was called last. Collective.

        None on all ranks except rank 0, and if a rank has done nothing.
        """
        with self._peers.waiting("DistributedReport"):
            self._peers.meet()  # the wait for it is part of what is summed up
        taken = self._own.take()
        with self._peers.waiting("DistributedReport"):
            end = self._peers.offset()
            everywhere = self._peers.gather((taken, Clock(self._start, end)))
        self._start = end
        if everywhere is None:
            return None
        iterations, of_hosts = zip(*everywhere, strict=True)
        if not all(iterations):
            return None
        return summarize(iterations, of_hosts, self._peers.hosts)

    def stop(self) -> None:
        """Sum up no more. Not collective."""
        spans.unlisten(self._own)
        self._peers.leave()
