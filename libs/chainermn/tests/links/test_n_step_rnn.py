"""Recurrent links split over several ranks, against one process with the whole sequences."""

from __future__ import annotations

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import pseudo_connect
from chainermn.links import create_multi_node_n_step_rnn

RNNS = [
    L.NStepLSTM,
    L.NStepBiLSTM,
    L.NStepGRU,
    L.NStepBiGRU,
    L.NStepRNNTanh,
    L.NStepRNNReLU,
    L.NStepBiRNNTanh,
    L.NStepBiRNNReLU,
]


def make(kind: type) -> chainer.Link:
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        return kind(2, 3, 4, 0.0)


def sequences(rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [generator.normal(size=(length, 3)) for length in (2, 3, 1)]


def chained(comm: CommunicatorBase, link: chainer.Link) -> chainer.Chain:
    return create_multi_node_n_step_rnn(
        link,
        comm,
        rank_in=comm.rank - 1 if comm.rank > 0 else None,
        rank_out=comm.rank + 1 if comm.rank < comm.size - 1 else None,
    )


def weigh(ys: list[chainer.Variable], rank: int) -> chainer.Variable:
    return sum(F.sum(y * y) for y in ys) * (rank + 1)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", RNNS, ids=lambda kind: kind.__name__)
def test_is_the_link_on_the_parts_in_turn(comm: CommunicatorBase, kind: type) -> None:
    alone = make(kind)
    losses, hidden, expected = [], [None] * alone.n_cells, []
    for rank in range(comm.size):
        *hidden, ys = alone(*hidden, sequences(rank))
        losses.append(weigh(ys, rank))
        expected.append([*hidden, *ys])
    (sum(losses) + F.sum(hidden[0])).backward()

    own = make(kind)
    rnn = chained(comm, own)
    *hidden, ys, delegate = rnn(sequences(comm.rank))
    for y, other in zip([*hidden, *ys], expected[comm.rank], strict=True):
        np.testing.assert_allclose(y.array, other.array, rtol=1e-12, atol=1e-14)
    loss = weigh(ys, comm.rank)
    if comm.rank == comm.size - 1:
        assert delegate is None
        loss += F.sum(hidden[0])
    else:
        (loss,) = pseudo_connect(delegate, loss)
    loss.backward()
    for (name, parameter), (_, other) in zip(
        sorted(own.namedparams()), sorted(alone.namedparams()), strict=True
    ):
        gradient = sum(comm.allgather_obj(parameter.grad))
        np.testing.assert_allclose(gradient, other.grad, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", [L.NStepLSTM, L.NStepGRU], ids=lambda kind: kind.__name__)
def test_one_direction_is_the_link_on_the_whole_sequence(
    comm: CommunicatorBase, kind: type
) -> None:
    whole = [
        np.concatenate(parts) for parts in zip(*map(sequences, range(comm.size)), strict=True)
    ]
    *hidden, _ = make(kind)(*[None] * make(kind).n_cells, whole)
    own = chained(comm, make(kind))(sequences(comm.rank))
    if comm.rank == comm.size - 1:
        for mine, other in zip(own, hidden, strict=False):
            np.testing.assert_allclose(mine.array, other.array, rtol=1e-12)
    if own[-1] is not None:
        own[-1].backward()
    else:
        F.sum(own[0]).backward()


@pytest.mark.mpi(1, 3)
def test_initial_states_where_none_are_received(comm: CommunicatorBase) -> None:
    link = make(L.NStepLSTM)
    rnn = create_multi_node_n_step_rnn(link, comm)
    hx, cx = (np.full((2, 3, 4), value) for value in (0.5, 0.25))
    *own, ys, delegate = rnn(hx, cx, sequences(0))
    hy, cy, expected = link(hx, cx, sequences(0))
    assert delegate is None
    for y, other in zip([*own, *ys], [hy, cy, *expected], strict=True):
        np.testing.assert_array_equal(y.array, other.array)
    np.testing.assert_array_equal(
        rnn(None, None, sequences(0))[0].array, rnn(sequences(0))[0].array
    )


@pytest.mark.mpi(1, 3)
def test_parameters_and_copies(comm: CommunicatorBase) -> None:
    rnn = create_multi_node_n_step_rnn(make(L.NStepGRU), comm)
    assert "/actual_rnn/0/w0" in dict(rnn.namedparams())
    assert rnn.n_cells == 1
    other = copy.deepcopy(rnn)
    assert other.comm is comm
    assert other.actual_rnn is not rnn.actual_rnn


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("wrong", [None, L.Linear(3, 3), L.NStepGRU])
def test_what_is_no_recurrent_link(comm: CommunicatorBase, wrong: object) -> None:
    with pytest.raises(ValueError, match="expected an NStepLSTM"):
        create_multi_node_n_step_rnn(wrong, comm)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("name", ["rank_in", "rank_out"])
def test_wrong_ranks(comm: CommunicatorBase, name: str) -> None:
    for wrong in (-1, 7, comm.rank, "a"):
        with pytest.raises(ValueError, match=f"{name} on rank {comm.rank}: expected None or"):
            create_multi_node_n_step_rnn(make(L.NStepGRU), comm, **{name: wrong})


@pytest.mark.mpi(2)
def test_wrong_inputs(comm: CommunicatorBase) -> None:
    rnn = create_multi_node_n_step_rnn(make(L.NStepLSTM), comm)
    for wrong in ((), (None, sequences(0))):
        with pytest.raises(TypeError, match="expected xs, or 2 hidden states and xs"):
            rnn(*wrong)
    rnn = create_multi_node_n_step_rnn(make(L.NStepGRU), comm, rank_in=1 - comm.rank)
    with pytest.raises(ValueError, match=f"hidden states come from rank {1 - comm.rank}"):
        rnn(np.zeros((2, 3, 4)), sequences(0))


@pytest.mark.mpi(2)
def test_links_of_different_kinds(comm: CommunicatorBase) -> None:
    rnn = chained(comm, make(L.NStepLSTM if comm.rank == 0 else L.NStepGRU))
    if comm.rank == 0:
        rnn(sequences(0))
    else:
        with pytest.raises(ValueError, match="expected 1 hidden states from rank 0, got 2"):
            rnn(sequences(1))
