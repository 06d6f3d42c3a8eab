"""Measure the differences between the clocks of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from chainermn import spans

if TYPE_CHECKING:
    from mpi4py import MPI

# Only the quickest counts. On an idle network, one of the first few is as quick as any.
_ROUND_TRIPS = 20


class Offset(NamedTuple):
    """Nanoseconds to add to a time of this host to get the time of the first host."""

    offset: int
    #: Largest possible difference from the true offset.
    error: int
    #: Time of the measurement on this host's clock.
    at: int


class Clock(NamedTuple):
    """The clock of a host, compared with the first host's clock at two moments."""

    start: Offset
    end: Offset

    @property
    def error(self) -> int:
        """Largest error of a corrected time, in nanoseconds, if the clocks run evenly."""
        return max(self.start.error, self.end.error)

    def corrected(self, time: int) -> int:
        """Convert a time of this host to the first host's clock."""
        start, end = self.start, self.end
        passed = max(end.at - start.at, 1)
        drift = (end.offset - start.offset) * (time - start.at) // passed
        return time + start.offset + drift


def measure(mpi_comm: MPI.Intracomm, hosts: Sequence[str]) -> Offset:
    """Compare this host's clock with the clock of rank 0's host. Collective.

    Rank 0 asks one rank of each other host for the time, and assumes that the answer was given in
    the middle of the quickest round trip (Cristian, "Probabilistic clock synchronization",
    Distributed Computing 3, 1989).

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        Communicator without any other messages in progress.
    hosts : sequence of str
        Name of each rank's host.
    """
    found = {hosts[0]: (0, 0)}
    for host in dict.fromkeys(hosts):
        peer = hosts.index(host)
        if host != hosts[0] and mpi_comm.rank == 0:
            found[host] = _ask(mpi_comm, peer)
        elif host != hosts[0] and mpi_comm.rank == peer:
            for _ in range(_ROUND_TRIPS):
                mpi_comm.recv(None, 0)
                mpi_comm.send(spans.now(), 0)
    offset, error = mpi_comm.bcast(found)[hosts[mpi_comm.rank]]
    return Offset(offset, error, spans.now())


def _ask(mpi_comm: MPI.Intracomm, peer: int) -> tuple[int, int]:
    """Return the offset and the error of another rank's clock."""
    trips = []
    for _ in range(_ROUND_TRIPS):
        sent = spans.now()
        mpi_comm.send(None, peer)
        answer: int = mpi_comm.recv(None, peer)
        received = spans.now()
        trips.append((received - sent, (sent + received) // 2 - answer))
    shortest, offset = min(trips)
    return offset, shortest // 2 + 1
