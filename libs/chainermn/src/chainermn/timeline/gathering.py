"""Sums over the spans of all ranks, while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainermn import spans
from chainermn.spans import Span
from chainermn.timeline import clocks
from chainermn.timeline.clocks import Clock
from chainermn.timeline.iterations import Iterations, kind_of
from chainermn.timeline.summary import Summary, summarize
from chainermn.transport.host.mpi import host_name

if TYPE_CHECKING:
    from mpi4py import MPI


class Gathering:
    """Listens to the spans of this rank, and sums them up iteration by iteration."""

    def __init__(self) -> None:
        self._pending: list[Span] = []
        self._iterations = Iterations()
        self._reached = spans.now()
        self._is_new = True

    def __call__(self, span: Span) -> None:
        """Take a span."""
        if span.track != spans.MAIN:
            return
        if span.name == "iteration":
            # What is left of one of which most has been taken belongs to the next.
            if span.start >= self._reached or self._is_new:
                self._close(span.end)
        elif kind_of(span, ""):
            self._pending.append(span)

    def take(self) -> Iterations:
        """Return what was gathered since this was called last, up to now."""
        self._close(spans.now())
        taken, self._iterations = self._iterations, Iterations()
        return taken

    def _close(self, end: int) -> None:
        self._iterations.add(self._reached, end, self._pending)
        self._pending.clear()
        self._reached = end
        self._is_new = False


class SharedGathering:
    """Sums up the spans of a communicator's ranks. Making one is collective."""

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._comm = mpi_comm.Dup()
        self._hosts = self._comm.allgather(host_name())
        self._start = clocks.measure(self._comm, self._hosts)
        self._own = Gathering()
        spans.listen(self._own)

    def take(self) -> Summary | None:
        """Return the summary of the time since this was called last, on rank 0. Collective."""
        taken = self._own.take()
        end = clocks.measure(self._comm, self._hosts)
        everywhere = self._comm.gather((taken, Clock(self._start, end)))
        self._start = end
        if everywhere is None:
            return None
        iterations, of_hosts = zip(*everywhere, strict=True)
        return summarize(iterations, of_hosts)

    def stop(self) -> None:
        """Sum up no more. Not collective."""
        spans.unlisten(self._own)
