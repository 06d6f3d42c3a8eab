"""What every communicator inherits, user-defined ones included."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase

pytestmark = pytest.mark.each_mpi


@pytest.fixture
def comm() -> Any:
    return chainermn.create_communicator("naive")


@pytest.mark.mpi(2)
def test_names_of_the_first_version(comm: Any) -> None:
    model = chainer.links.Linear(2, 2)
    model.W.array[...] = comm.rank + 1
    comm.broadcast_data(model)
    np.testing.assert_array_equal(model.W.array, np.ones((2, 2)))
    model.W.grad = np.full((2, 2), 4.0 * comm.rank, np.float32)
    model.b.grad = None
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model.W.grad, np.full((2, 2), 2.0))
    assert model.b.grad is None


@pytest.mark.mpi(1, 2)
def test_with_block(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[CommunicatorBase] = []
    monkeypatch.setattr(type(comm), "finalize", lambda self: ends.append(self))
    with pytest.raises(KeyError), comm:
        raise KeyError
    assert ends == []  # the other ranks may never get there
    with comm as entered:
        assert entered is comm
        assert ends == []
    assert ends == [comm]


@pytest.mark.mpi(1, 2, 3)
def test_what_is_true_on_any_rank(comm: Any) -> None:
    flags = [False, comm.rank == 0, comm.rank == comm.size - 1, True]
    for any_of_each in (CommunicatorBase.any_of_each, type(comm).any_of_each):
        assert list(any_of_each(comm, flags)) == [False, True, True, True]


@pytest.mark.mpi(1, 2, 3)
def test_mean_unless_something_is_true_on_any_rank(comm: Any) -> None:
    class Logging(type(comm)):  # type: ignore[misc]
        """A subclass as users may have written it."""

        calls = 0

        def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
            self.calls += 1
            super().multi_node_mean_grad(model, zero_fill)

    for each in (comm, Logging(comm.mpi_comm)):
        model = chainer.links.Linear(2, 2)
        model.W.grad = np.full((2, 2), 2.0 * each.rank, np.float32)
        flags = [False, each.rank == each.size - 1]
        assert list(each.mean_grad_unless(flags, model)) == [False, True]
        assert (model.W.grad == 2.0 * each.rank).all()
        assert list(each.mean_grad_unless([False], model)) == [False]
        assert (model.W.grad == each.size - 1).all()
        assert getattr(each, "calls", 1) == 1


def test_communicator_of_others_has_no_background() -> None:
    class Other(CommunicatorBase):
        """A communicator with nothing of its own."""

    Other.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Other does not exchange in the background"):
        Other().create_overlapped_exchange()
    with pytest.raises(RuntimeError, match="Other does not exchange in the background"):
        Other().create_background_exchange()
