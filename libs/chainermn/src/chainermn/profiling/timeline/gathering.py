"""Sum up the spans of all ranks during training."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from chainermn import spans
from chainermn.profiling.timeline.clocks import Clock
from chainermn.profiling.timeline.iterations import Iteration, divide, kind_of
from chainermn.profiling.timeline.peers import Peers
from chainermn.profiling.timeline.summary import Summary, summarize
from chainermn.spans import Span

if TYPE_CHECKING:
    from mpi4py import MPI

#: Limits on the iterations since the last report that a rank keeps, and on their calls. They take
#: a few megabytes.
MOST_ITERATIONS, MOST_CALLS = 2000, 10_000


class Gathering:
    """Listens to the spans of this rank, and sums them up iteration by iteration."""

    def __init__(self) -> None:
        self._pending: list[Span] = []
        self._iterations: deque[Iteration] = deque()
        self._n_calls = 0
        # Time up to which everything has been assigned to iterations.
        self._reached: int | None = None

    def __call__(self, span: Span) -> None:
        """Take a span."""
        if span.track != spans.MAIN:
            return
        if span.name == "iteration":
            # If an iteration was already taken in part, its rest belongs to the next one.
            if self._reached is None or span.start >= self._reached:
                self._close(span.start, span.end)
        elif kind_of(span, ""):
            self._pending.append(span)

    def take(self) -> list[Iteration]:
        """Return the iterations since the last call, up to now."""
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
    """Sums up the spans of a communicator's ranks. Creating one is collective."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._peers = Peers(mpi_comm)
        self._start = self._peers.offset()
        self._own = Gathering()
        spans.listen(self._own)

    def take(self) -> Summary | None:
        """Return a summary of the time since the last call. Collective.

        Returns None on all ranks except rank 0, and if a rank has done nothing.
        """
        with self._peers.waiting("DistributedReport"):
            self._peers.meet()  # the summary includes this wait
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
        """Stop listening. Not collective."""
        spans.unlisten(self._own)
        self._peers.leave()
