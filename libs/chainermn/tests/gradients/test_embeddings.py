"""Embeddings: sending only the used rows gives the same bits as sending all rows."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.compression import TopK
from chainermn.gradients.overlap import plan as rounds
from chainermn.transport.collectives import Collectives
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
WORDS, WIDTH = 50, 6


class Dense(NaiveCommunicator):
    sends_rows = False


class Network(chainer.Chain):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope(), chainer.using_config("dtype", dtype):
            self.embed = L.EmbedID(WORDS, WIDTH, ignore_label=-1)
            self.other = L.EmbedID(WORDS, WIDTH)
            self.out = L.Linear(WIDTH, 3)

    def forward(self, words: np.ndarray) -> Any:
        h = F.sum(self.embed(words), axis=1)
        # All rows of ``other`` are used, like those of an output layer.
        return F.mean(self.out(h) ** 2) + F.mean(F.matmul(h, F.transpose(self.other.W)) ** 2)


def on_two_hosts(kind: Any, **settings: Any) -> Any:
    hosts = ("ab" * WORLD.size)[: WORLD.size]
    return kind(WORLD, topology=Topology.from_hosts(hosts, WORLD.rank), **settings)


def words(rank: int, step: int) -> np.ndarray:
    # In the third step, rank 0 has no words at all.
    most = 0 if rank == 0 and step == 2 else WORDS
    return np.random.default_rng([rank, step]).integers(-1, most, (2, 4 + rank)).astype(np.int32)


def train(comm: Any, dtype: Any, overlap: bool, **settings: Any) -> dict[str, np.ndarray]:
    model = Network(dtype)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.MomentumSGD(0.1), comm, overlap=overlap, **settings
    ).setup(model)
    for step in (0, *range(5)):
        optimizer.update(model, words(comm.rank, step))
    result = {name: parameter.array.copy() for name, parameter in model.namedparams()}
    for name, value in result.items():
        assert len(set(comm.allgather_obj(value.tobytes()))) == 1, name
    return result


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", [None, "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_same_bits_as_all_rows(
    overlap: bool, wire: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_bits(overlap, wire, dtype, monkeypatch)


@pytest.mark.mpi(3)
@pytest.mark.parametrize(
    ("overlap", "wire", "dtype"),
    [(False, None, np.float32), (True, None, np.float64), (True, "float16", np.float32)],
)
def test_same_bits_as_all_rows_on_three_ranks(
    overlap: bool, wire: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_bits(overlap, wire, dtype, monkeypatch)


def check_same_bits(overlap: bool, wire: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BUCKET_BYTES", 40)
    dense, sparse = (
        train(on_two_hosts(kind, allreduce_grad_dtype=wire), dtype, overlap)
        for kind in (Dense, NaiveCommunicator)
    )
    for name, value in dense.items():
        np.testing.assert_array_equal(sparse[name], value, err_msg=name)
    assert not np.array_equal(dense["/embed/W"], Network(dtype).embed.W.array)


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("name", sorted(set(registered()) - {"dummy", "pure_nccl", "single_node"}))
def test_every_communicator(name: str) -> None:
    expected = train(on_two_hosts(Dense), np.float64, False)
    actual = train(on_two_hosts(registered()[name]), np.float64, False)
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-12, err_msg=key)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_sends_what_is_smaller(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = (
        chainermn.create_communicator("naive") if hosts == 1 else on_two_hosts(NaiveCommunicator)
    )
    model = Network(np.float32)
    sent: list[int] = []
    for name in ("mean", "allgather"):
        method = getattr(Collectives, name)

        def counting(self: Any, buffer: Any, method: Any = method) -> Any:
            sent.append(buffer.nbytes)
            return method(self, buffer)

        monkeypatch.setattr(Collectives, name, counting)

    def bytes_sent(n_rows: int) -> int:
        sent.clear()
        model.cleargrads()
        model.embed.W.grad = np.zeros((WORDS, WIDTH), np.float32)
        model.embed.W.grad[: n_rows if comm.rank == 0 else 1] = 1
        comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(model.embed.W.grad[0], 1)
        np.testing.assert_array_equal(model.embed.W.grad[1:n_rows], 0.5)
        np.testing.assert_array_equal(model.embed.W.grad[n_rows:], 0)
        return sum(sent)

    everything = WORDS * WIDTH * 4
    if hosts == 1:
        assert bytes_sent(5) == everything
        return
    count = 8
    assert bytes_sent(5) == count + 5 * (4 + WIDTH * 4)
    assert bytes_sent(WORDS) == count + everything


@pytest.mark.mpi(2)
def test_numbers_that_are_none() -> None:
    comm = on_two_hosts(NaiveCommunicator)
    model = Network(np.float32)
    for value in (np.nan, np.inf):
        model.cleargrads()
        model.embed.W.grad = np.zeros((WORDS, WIDTH), np.float32)
        if comm.rank == 1:
            model.embed.W.grad[3] = value
        comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(model.embed.W.grad[3], value)
        assert np.isfinite(model.embed.W.grad[4:]).all()


@pytest.mark.mpi(2)
def test_overflow_is_noticed() -> None:
    comm = on_two_hosts(NaiveCommunicator, allreduce_grad_dtype="float16")
    model = Network(np.float32)
    model.embed.W.grad = np.zeros((WORDS, WIDTH), np.float32)
    model.embed.W.grad[3] = 1e6
    with pytest.raises(OverflowError, match="/embed/W"):
        comm.multi_node_mean_grad(model)


@pytest.mark.mpi(2)
def test_what_is_compressed_is_not_sent_by_rows() -> None:
    comm = on_two_hosts(NaiveCommunicator)
    compression = TopK(min_size=WORDS * WIDTH)
    model = Network(np.float32)
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.SGD(), comm, compression=compression
    ).setup(model)
    for step in range(3):
        optimizer.update(model, words(comm.rank, step))
    assert optimizer.pending().arrays.keys() == {"/embed/W", "/other/W"}
