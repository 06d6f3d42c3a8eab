"""NCCL calls in a script while NCCL exchanges gradients; MPI stands in for NCCL.

The stand-in reports a deadlock if kernels of two communicators have no fixed order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.gradients.background import BackgroundExchange
from chainermn.transport.gpu import nccl_turns
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
BY_NCCL = sorted(set(registered()) - {"dummy", "naive", "flat"})


def make(name: str) -> Any:
    return registered()[name](WORLD, topology=Topology.from_hosts("a" * WORLD.size, WORLD.rank))


def model_with(stand_in: Any, value: float) -> chainer.Chain:
    model = chainer.Chain()
    with model.init_scope():
        model.p = chainer.Parameter(stand_in.to_gpu(np.zeros(3, "f")))
    model.p.grad = stand_in.to_gpu(np.full(3, value, "f"))
    return model


@contextmanager
def kernels_beside(stand_in: Any, comm: Any) -> Iterator[None]:
    """Exchange gradients with NCCL during the block, or until the block waits for its turn."""
    model = model_with(stand_in, comm.rank)
    exchange = BackgroundExchange(comm.gradients)
    library = stand_in.library
    library.may_finish.clear()
    try:
        exchange.start(model, False)
        library.has_launched.wait()
        yield
    finally:
        library.may_finish.set()
        exchange.wait()
    np.testing.assert_allclose(model.p.grad, (comm.size - 1) / 2)
    exchange.close()


@pytest.fixture
def waiting_ends_it(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels finish once something waits for them."""
    wait = nccl_turns.Turn.wait

    def wait_and_let_finish(self: nccl_turns.Turn) -> None:
        stand_in.library.may_finish.set()
        wait(self)

    monkeypatch.setattr(nccl_turns.Turn, "wait", wait_and_let_finish)


@pytest.mark.mpi(2, 3)
def test_collectives_of_a_script_that_double_buffers(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run them with MPI, so that they need not wait."""
    wait = nccl_turns.Turn.wait

    def wait_in_background(self: nccl_turns.Turn) -> None:
        is_script = threading.current_thread() is threading.main_thread()
        assert stand_in.library.may_finish.is_set() or not is_script
        wait(self)

    monkeypatch.setattr(nccl_turns.Turn, "wait", wait_in_background)
    comm = make("pure_nccl")
    rank, size = comm.rank, comm.size
    comm.allreduce(stand_in.to_gpu(np.zeros(1)))
    assert "allReduce" in stand_in.log  # without an exchange, they run with NCCL
    with kernels_beside(stand_in, comm):
        own = stand_in.to_gpu(np.full(2, rank, "f"))
        assert (comm.allreduce(own) == size * (size - 1) / 2).all()
        assert (comm.bcast(own, size - 1) == size - 1).all()
        for other, array in enumerate(comm.allgather(own)):
            assert (array == other).all()
        layer = chainermn.links.MultiNodeBatchNormalization(2, comm)
        y = layer(stand_in.to_gpu(np.array([[rank, 0], [rank + 1, 1]], "f")))
        assert abs(float(sum(map(np.sum, comm.allgather(y.array))))) < 1e-5
        model = model_with(stand_in, 0)
        model.p.array[...] = rank + 5
        comm.bcast_data(model)
        assert (model.p.array == 5).all()
        assert not stand_in.library.may_finish.is_set()
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.usefixtures("waiting_ends_it")
@pytest.mark.parametrize("name", BY_NCCL)
def test_gradients_of_another_model(stand_in: Any, name: str) -> None:
    comm = make(name)
    for _ in range(2):
        model = model_with(stand_in, 2 * comm.rank)
        with kernels_beside(stand_in, comm):
            comm.multi_node_mean_grad(model)
        np.testing.assert_allclose(model.p.grad, comm.size - 1)
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.usefixtures("waiting_ends_it")
def test_two_models_that_are_double_buffered(stand_in: Any) -> None:
    comm = make("pure_nccl")
    exchange = BackgroundExchange(comm.gradients)
    for _ in range(2):
        model = model_with(stand_in, 2 * comm.rank)
        with kernels_beside(stand_in, comm):
            exchange.start(model, False)
            exchange.wait()
        np.testing.assert_allclose(model.p.grad, comm.size - 1)
    exchange.close()
    comm.finalize()


@pytest.mark.mpi(2, 3)
@pytest.mark.usefixtures("waiting_ends_it")
def test_another_communicator(stand_in: Any) -> None:
    comm, other, connected = make("pure_nccl"), make("pure_nccl"), make("pure_nccl")
    connected.bcast(stand_in.to_gpu(np.zeros(1, "f")))
    for each in (other, connected):
        with kernels_beside(stand_in, comm):
            total = each.allreduce(stand_in.to_gpu(np.ones(2, "f")))
        assert (total == comm.size).all()
    for each in (comm, other, connected):
        each.finalize()
