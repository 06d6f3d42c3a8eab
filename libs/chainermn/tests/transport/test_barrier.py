import mmap
import platform
import resource
import time

import pytest
from mpi4py import MPI

from chainermn.transport.host import barrier
from chainermn.transport.host.barrier import Barrier
from chainermn.transport.host.futex import Futex
from chainermn.transport.host.memory import share_memory
from chainermn.transport.host.shared_memory import bytes_needed

WORLD = MPI.COMM_WORLD
FEW, MANY = 1, 1000  # cores


def shared() -> mmap.mmap:
    memory = share_memory(WORLD, bytes_needed(WORLD.size))
    assert isinstance(memory, mmap.mmap), memory
    return memory


def seconds_of_computing() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("n_cores", [FEW, MANY])
@pytest.mark.parametrize("has_futex", [True, False])
def test_nobody_passes_before_all_have_come(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, has_futex: bool
) -> None:
    if not has_futex:
        monkeypatch.setattr(platform, "machine", lambda: "another processor")
    memory = shared()
    meeting = Barrier(memory, WORLD.rank, WORLD.size, n_cores)
    begin = barrier.bytes_needed(WORLD.size)
    for number in range(1, 200):
        memory[begin + WORLD.rank] = number
        meeting.arrive()
        meeting.Wait()
        assert memory[begin : begin + WORLD.size] == bytes([number] * WORLD.size)
        meeting.arrive()
        meeting.Wait()


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("n_cores", [FEW, MANY])
def test_the_last_wakes_those_that_sleep(monkeypatch: pytest.MonkeyPatch, n_cores: int) -> None:
    if not Futex.is_available():
        pytest.skip("this system has no futex")
    # A rank that is not woken exceeds this test's time limit.
    monkeypatch.setattr(barrier, "SECONDS_OF_SLEEP", 3600.0)
    monkeypatch.setattr(barrier, "LOOKS_BEFORE_SLEEPING", 100)
    meeting = Barrier(shared(), WORLD.rank, WORLD.size, n_cores)
    for last in range(WORLD.size):
        if WORLD.rank == last:
            time.sleep(0.05)
        meeting.arrive()
        meeting.Wait()


@pytest.mark.mpi(3)
def test_a_test_wakes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "SECONDS_OF_SLEEP", 3600.0)
    meeting = Barrier(shared(), WORLD.rank, WORLD.size, FEW)
    if WORLD.rank == 0:
        time.sleep(0.2)
        meeting.arrive()
        while not meeting.Test():
            time.sleep(0.01)
    else:
        meeting.arrive()
        meeting.Wait()


def test_who_sleeps_at_the_next_meeting_is_not_forgotten_because_of_who_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not Futex.is_available():
        pytest.skip("this system has no futex")
    memory = mmap.mmap(-1, barrier.bytes_needed(3))
    calls: list[str] = []
    monkeypatch.setattr(Futex, "wait", lambda *_: calls.append("wait"))
    monkeypatch.setattr(Futex, "wake", lambda _: calls.append("wake"))
    first, late, last = (Barrier(memory, rank, 3, FEW) for rank in range(3))
    for rank in (first, late, last):
        rank.arrive()
    assert first.Test()
    first.arrive()
    first.sleep()
    late.sleep()  # it last looked before the others came
    assert calls == ["wait"]
    for rank in (late, last):
        rank.arrive()
    assert last.Test()
    assert calls == ["wait", "wake"]


@pytest.mark.mpi(3)
@pytest.mark.parametrize("n_cores", [FEW, MANY])
def test_who_waits_for_long_does_not_compute(n_cores: int) -> None:
    meeting = Barrier(shared(), WORLD.rank, WORLD.size, n_cores)
    before = seconds_of_computing()
    if WORLD.rank == 0:
        time.sleep(0.6)
    meeting.arrive()
    meeting.Wait()
    assert seconds_of_computing() - before < 0.3


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 12, 16, 24, 64, 128, 512])
def test_memory_is_bounded_per_host(size: int) -> None:
    # Docker's 64 MiB must hold this, two duplicates, and what MPICH takes for 16 ranks.
    assert 3 * bytes_needed(size) + (9 << 20) < 64 << 20
    assert bytes_needed(size) > 8 << 20
