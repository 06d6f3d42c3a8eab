"""Steps that fail on one rank fail on all."""

from __future__ import annotations

from typing import Any

import pytest

from chainermn.agreement import check_root, exit_together, run_on_root, run_together

pytestmark = pytest.mark.each_mpi


@pytest.mark.mpi(1, 2, 3, 4)
def test_result_is_that_of_this_rank(comm: Any) -> None:
    assert run_together(comm, "here", lambda: comm.rank) == comm.rank


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("kind", [TypeError, ValueError, IndexError, KeyError, OSError])
def test_failure(comm: Any, kind: type[Exception]) -> None:
    last = comm.size - 1

    def act() -> None:
        if comm.rank == last:
            raise kind("lost")

    expected = RuntimeError if kind is OSError and comm.rank != last else kind
    with pytest.raises(expected, match="lost") as caught:
        run_together(comm, "here", act)
    if comm.rank != last:
        assert f"here: rank {last}: {kind.__name__}" in str(caught.value)
    else:
        assert caught.value.__notes__ == [f"(here, rank {last}; all ranks raise)"]


@pytest.mark.mpi(1, 2, 3)
def test_result_of_the_root_is_that_of_all(comm: Any) -> None:
    called = []

    def act() -> list[int]:
        called.append(comm.rank)
        return [comm.rank]

    for ranks in (comm, comm.mpi_comm):
        assert [run_on_root(ranks, root, "here", act) for root in range(comm.size)] == [
            [root] for root in range(comm.size)
        ]
    assert called == [comm.rank] * 2


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_failure_of_the_root(comm: Any, kind: type[Exception]) -> None:
    last = comm.size - 1

    def act() -> None:
        raise kind("lost")

    expected = RuntimeError if kind is OSError and comm.rank != last else kind
    with pytest.raises(expected) as caught:
        run_on_root(comm, last, "here", act)
    message = "lost" if comm.rank == last else f"here: rank {last}: {kind.__name__}: lost"
    assert str(caught.value) == message
    assert comm.allreduce_obj(1) == comm.size  # nothing is left pending


@pytest.mark.mpi(1, 2, 3)
def test_result_of_the_root_that_cannot_be_pickled(comm: Any) -> None:
    if comm.size > 1:
        with pytest.raises(TypeError, match="pickle"):
            run_on_root(comm, 0, "here", lambda: lambda: 1)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("root", [-1, 3, 0.5])
def test_root_that_is_no_rank(comm: Any, root: Any) -> None:
    with pytest.raises(ValueError, match="here: rank 0: root must be a rank"):
        check_root(comm, root, "here")
    check_root(comm, comm.size - 1, "here")


@pytest.mark.mpi(2, 3)
def test_roots_that_differ(comm: Any) -> None:
    with pytest.raises(ValueError, match=r"rank 0: root=0; rank 1: root=1"):
        check_root(comm, comm.rank, "here")


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, ImportError])
def test_program_ends_with_one_line(comm: Any, kind: type[Exception]) -> None:
    with exit_together(comm):
        assert run_on_root(comm, 0, "here", lambda: 5) == 5
    with pytest.raises(SystemExit) as caught, exit_together(comm):
        if comm.rank == comm.size - 1:
            raise kind("no such file")
    assert caught.value.code == ("error: no such file" if comm.rank == 0 else 1)


@pytest.mark.mpi(1, 2)
def test_program_ends_with_what_all_ranks_raise(comm: Any) -> None:
    def fail() -> None:
        raise FileNotFoundError("no such file")

    with pytest.raises(SystemExit) as caught, exit_together(comm):
        run_on_root(comm, 0, "here", fail)
    assert caught.value.code == ("error: no such file" if comm.rank == 0 else 1)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", [EOFError, KeyError, AssertionError])
def test_program_ends_with_whatever_all_ranks_raise(comm: Any, kind: type[Exception]) -> None:
    def fail() -> None:
        if comm.rank == comm.size - 1:
            raise kind("broken")

    with pytest.raises(SystemExit) as caught, exit_together(comm):
        run_together(comm, "here", fail)
    assert (comm.rank > 0) == (caught.value.code == 1)
    if comm.rank == 0:
        assert "broken" in caught.value.code


@pytest.mark.mpi(1)
def test_mistake_in_the_program_is_not_its_input(comm: Any) -> None:
    with pytest.raises(ZeroDivisionError), exit_together(comm):
        raise ZeroDivisionError
