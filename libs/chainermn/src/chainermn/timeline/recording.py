"""The spans of all ranks, recorded from one moment to another."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from chainermn import spans
from chainermn.spans import Span
from chainermn.timeline import clocks
from chainermn.timeline.clocks import Clock
from chainermn.timeline.trace import Recorded
from chainermn.transport.host.mpi import host_name

if TYPE_CHECKING:
    from mpi4py import MPI

#: A rank keeps its latest spans, at most this many: some ten megabytes.
MOST_SPANS = 50_000


class Recording:
    """Keeps the spans of a communicator's ranks. Making one is collective.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
    first, last : int
        Iterations of a trainer from which and up to which spans are kept; all by default.
    """

    def __init__(
        self, mpi_comm: MPI.Intracomm, first: int | None = None, last: int | None = None
    ) -> None:
        self._comm = mpi_comm.Dup()
        self._hosts = self._comm.allgather(host_name())
        self._start = clocks.measure(self._comm, self._hosts)
        self._kept: deque[Span] = deque(maxlen=MOST_SPANS)
        self._first, self._last = first or 0, last
        self._is_over = False
        spans.listen(self._keep)

    def _keep(self, span: Span) -> None:
        iteration = span.details.get("iteration") if span.name == "iteration" else None
        if iteration is not None and iteration < self._first:
            self._kept.clear()
        elif not self._is_over:
            self._kept.append(span)
        if iteration is not None and iteration == self._last:
            self._is_over = True

    def stop(self) -> list[Recorded] | None:
        """Keep no more spans; return those of all ranks on rank 0, None elsewhere. Collective."""
        spans.unlisten(self._keep)
        clock = Clock(self._start, clocks.measure(self._comm, self._hosts))
        rank = self._comm.rank
        recorded = Recorded(rank, self._hosts[rank], _complete(self._kept), clock)
        everywhere = self._comm.gather(recorded)
        self._comm.Free()
        return everywhere

    def discard(self) -> None:
        """Keep no more spans, and none of those that there are."""
        spans.unlisten(self._keep)
        self._kept.clear()


def _complete(kept: deque[Span]) -> list[Span]:
    """Return the spans of the time for which there are all."""
    if len(kept) < MOST_SPANS:
        return list(kept)
    # Those that were dropped ended before this one.
    begin = kept[0].end
    return [span for span in kept if span.start >= begin]
