"""How far the clocks of the hosts are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from chainermn import spans

if TYPE_CHECKING:
    from mpi4py import MPI

# The quickest of them counts. On an idle network the first few are as quick as any.
_ROUND_TRIPS = 20


class Offset(NamedTuple):
    """What to add to a time of this host to have that of the first host, in nanoseconds."""

    offset: int
    #: The true offset differs by at most this.
    error: int
    #: When it was measured, by this host's clock.
    at: int


class Clock(NamedTuple):
    """The clock of a host, compared with that of the first host at two moments."""

    start: Offset
    end: Offset

    @property
    def error(self) -> int:
        """How wrong a corrected time is at most, in nanoseconds, if the clocks run evenly."""
        return max(self.start.error, self.end.error)

    def corrected(self, time: int) -> int:
        """Return a time of this host as the first host's clock had it."""
        start, end = self.start, self.end
        passed = max(end.at - start.at, 1)
        drift = (end.offset - start.offset) * (time - start.at) // passed
        return time + start.offset + drift


def measure(mpi_comm: MPI.Intracomm, hosts: Sequence[str]) -> Offset:
    """Compare this host's clock with that of the host of rank 0. Collective.

    Rank 0 asks one rank of each other host for the time, and takes its answer to be of the middle
    of the quickest round trip (Cristian, "Probabilistic clock synchronization", Distributed
    Computing 3, 1989).

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
        On which no other messages are under way.
    hosts : sequence of str
        Name of each rank's host.
    """
    found = {hosts[0]: (0, 0)}
    for host in dict.fromkeys(hosts):
        peer = hosts.index(host)
        if host != hosts[0] and mpi_comm.rank == 0:
            found[host] = _ask(mpi_comm, peer)
        elif host != hosts[0] and mpi_comm.rank == peer:
            _answer(mpi_comm)
    offset, error = mpi_comm.bcast(found)[hosts[mpi_comm.rank]]
    return Offset(offset, error, spans.now())


def _ask(mpi_comm: MPI.Intracomm, peer: int) -> tuple[int, int]:
    """Return offset and error of the clock of another rank."""
    trips = []
    for _ in range(_ROUND_TRIPS):
        sent = spans.now()
        mpi_comm.send(None, peer)
        answer: int = mpi_comm.recv(None, peer)
        received = spans.now()
        trips.append((received - sent, (sent + received) // 2 - answer))
    shortest, offset = min(trips)
    return offset, shortest // 2 + 1


def _answer(mpi_comm: MPI.Intracomm) -> None:
    for _ in range(_ROUND_TRIPS):
        mpi_comm.recv(None, 0)
        mpi_comm.send(spans.now(), 0)
