"""Record the spans of all ranks between two moments."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from chainermn import spans
from chainermn.profiling.timeline.clocks import Clock
from chainermn.profiling.timeline.peers import Peers
from chainermn.profiling.timeline.trace import Recorded
from chainermn.spans import Span

if TYPE_CHECKING:
    from mpi4py import MPI

#: Number of spans that a rank keeps, the latest ones. They take about twenty megabytes.
MOST_SPANS = 50_000


class Recording:
    """Keeps the spans of a communicator's ranks. Creating one is collective.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator of the ranks.
    window : (int, int), optional
        First and last iteration whose spans to keep. By default, all are kept.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, window: tuple[int, int] | None = None) -> None:
        self._peers = Peers(mpi_comm)
        self._start = self._peers.offset()
        self._kept: deque[Span] = deque(maxlen=MOST_SPANS)
        self._window = window
        # Spans of the current iteration, which may not be in the window.
        self._pending: deque[Span] = deque(maxlen=MOST_SPANS)
        self._kept_until = 0
        spans.listen(self._keep)

    def _keep(self, span: Span) -> None:
        if self._window is None:
            self._kept.append(span)
        elif span.name == "iteration":
            first, last = self._window
            if first <= span.details.get("iteration", first) <= last:
                self._kept.extend((*self._pending, span))
                self._kept_until = span.end
            self._pending.clear()
        elif span.start < self._kept_until:  # a late span of a GPU
            self._kept.append(span)
        else:
            self._pending.append(span)

    def stop(self) -> list[Recorded] | None:
        """Stop recording; return all ranks' spans on rank 0 and None elsewhere. Collective."""
        spans.unlisten(self._keep)
        peers = self._peers
        # Dropped spans ended before the first one that is left.
        begin = self._kept[0].end if len(self._kept) == MOST_SPANS else None
        with peers.waiting("the end of a timeline"):
            clock = Clock(self._start, peers.offset())
            recorded = Recorded(peers.rank, peers.hosts[peers.rank], list(self._kept), clock)
            everywhere = peers.gather((recorded, begin))
        peers.leave()
        return None if everywhere is None else _of_the_same_time(everywhere)

    def discard(self) -> None:
        """Stop recording, and drop all spans."""
        spans.unlisten(self._keep)
        self._kept.clear()
        self._peers.leave()


def _of_the_same_time(everywhere: list[tuple[Recorded, int | None]]) -> list[Recorded]:
    """Return the spans that start after the moment from which all ranks have all their spans."""
    begins = [one.clock.corrected(begin) for one, begin in everywhere if begin is not None]
    begin = max(begins, default=0)
    return [
        one._replace(
            spans=[span for span in one.spans if one.clock.corrected(span.start) >= begin]
        )
        for one, _ in everywhere
    ]
