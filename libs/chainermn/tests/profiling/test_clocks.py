"""How the clocks of hosts are compared, and times corrected."""

from __future__ import annotations

import time

import pytest

from chainermn import spans
from chainermn.profiling.timeline import clocks
from chainermn.profiling.timeline.clocks import Clock, Offset


def test_the_offset_changes_evenly_between_the_measurements() -> None:
    clock = Clock(Offset(100, 5, at=1000), Offset(120, 7, at=2000))
    assert [clock.corrected(time) for time in (1000, 1500, 2000)] == [1100, 1610, 2120]
    assert clock.error == 7


def test_two_measurements_at_the_same_moment() -> None:
    offset = Offset(100, 5, at=1000)
    assert Clock(offset, offset).corrected(1000) == 1100


@pytest.mark.mpi(1, 2, 3)
def test_true_offsets_differ_by_no_more_than_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    # Pretend that the hosts of ranks 1 and 2 booted earlier and later than that of rank 0.
    ahead = {0: 0, 1: 10**12, 2: -(10**12)}[MPI.COMM_WORLD.rank]
    monkeypatch.setattr(spans, "now", lambda: time.monotonic_ns() + ahead)
    hosts = ["a", "b", "c"][: MPI.COMM_WORLD.size]
    found = clocks.measure(MPI.COMM_WORLD, hosts)
    assert abs(found.offset + ahead) <= found.error
    assert (found.error == 0) == (MPI.COMM_WORLD.rank == 0)


@pytest.mark.mpi(3)
def test_ranks_of_a_host_share_its_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ahead = 0 if comm.rank == 0 else 10**9
    monkeypatch.setattr(spans, "now", lambda: time.monotonic_ns() + ahead)
    found = clocks.measure(comm, ["a", "b", "b"])
    first, second, third = comm.allgather((found.offset, found.error))
    assert first == (0, 0)
    assert second == third != first
