"""The link, against chainer.links.BatchNormalization on the concatenated batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links import MultiNodeBatchNormalization, create_mnbn_model


def batch(step: int, shape: tuple[int, ...] = (12, 3), dtype: str = "f8") -> np.ndarray:
    return np.random.default_rng(step).normal(1, 2, shape).astype(dtype)


def part(comm: CommunicatorBase, whole: np.ndarray, sizes: tuple[int, ...] = ()) -> np.ndarray:
    """Return this rank's share of a batch; by default, the shares are unequal."""
    shares = sizes or {1: (12,), 2: (5, 7), 3: (1, 8, 3), 4: (2, 0, 9, 1)}[comm.size]
    start = sum(shares[: comm.rank])
    return whole[start : start + shares[comm.rank]]


def same_state(own: chainer.Link, other: chainer.Link, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(own.avg_mean, other.avg_mean, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(own.avg_var, other.avg_var, rtol=tolerance, atol=tolerance)
    assert own.N == other.N


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("finetune", [False, True])
def test_statistics_over_several_batches(comm: CommunicatorBase, finetune: bool) -> None:
    own = MultiNodeBatchNormalization(3, comm, decay=0.8, dtype="f8")
    alone = L.BatchNormalization(3, decay=0.8, dtype="f8")
    for round_ in range(2):
        for step in range(3):
            x = batch(10 * round_ + step)
            y = own(part(comm, x), finetune=finetune)
            expected = alone(x, finetune=finetune).array
            np.testing.assert_allclose(y.array, part(comm, expected), rtol=1e-12, atol=1e-12)
            same_state(own, alone)
        own.start_finetuning()
        alone.start_finetuning()
    with chainer.using_config("train", False):
        x = batch(99)
        np.testing.assert_allclose(own(x).array, alone(x).array, rtol=1e-12, atol=1e-12)


def loss(model: chainer.Link, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
    return F.mean_squared_error(model(x), t)


def network(bn: Any) -> chainer.Sequential:
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(
            L.Convolution2D(2, 3, 2), bn(3), F.relu, L.Linear(12, 4), bn(4), F.tanh, L.Linear(4, 2)
        )


@pytest.mark.mpi(1, 3)
def test_training_equals_one_process(comm: CommunicatorBase) -> None:
    alone = network(L.BatchNormalization)
    shared = network(lambda size: MultiNodeBatchNormalization(size, comm))
    reference = chainer.optimizers.MomentumSGD(0.1).setup(alone)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm
    ).setup(shared)
    equal = (12 // comm.size,) * comm.size
    x, t = batch(0, (12, 2, 3, 3)), batch(1, (12, 2))
    # The first update only synchronizes, but its forward pass counts for the statistics.
    loss(alone, x, t)
    optimizer.update(loss, shared, part(comm, x, equal), part(comm, t, equal))
    for step in range(1, 6):
        x, t = batch(2 * step, (12, 2, 3, 3)), batch(2 * step + 1, (12, 2))
        reference.update(loss, alone, x, t)
        optimizer.update(loss, shared, part(comm, x, equal), part(comm, t, equal))
    ours, theirs = dict(shared.namedparams()), dict(alone.namedparams())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        np.testing.assert_allclose(parameter.array, theirs[name].array, rtol=1e-9, atol=1e-11)
    for i in (1, 4):
        same_state(shared[i], alone[i], 1e-9)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("use_gamma", [True, False])
@pytest.mark.parametrize("use_beta", [True, False])
def test_without_gamma_or_beta(comm: CommunicatorBase, use_gamma: bool, use_beta: bool) -> None:
    options = {"dtype": "f8", "use_gamma": use_gamma, "use_beta": use_beta}
    own = MultiNodeBatchNormalization(3, comm, **options)
    alone = L.BatchNormalization(3, **options)
    assert {n for n, _ in own.namedparams()} == {n for n, _ in alone.namedparams()}
    x = batch(0)
    np.testing.assert_allclose(own(part(comm, x)).array, part(comm, alone(x).array), rtol=1e-10)


@pytest.mark.mpi(1, 2)
def test_initial_values(comm: CommunicatorBase) -> None:
    link = MultiNodeBatchNormalization(
        3, comm, initial_gamma=2, initial_beta=3, initial_avg_mean=4, initial_avg_var=5
    )
    for array, value in [
        (link.gamma.array, 2),
        (link.beta.array, 3),
        (link.avg_mean, 4),
        (link.avg_var, 5),
    ]:
        assert array.dtype == np.float32
        assert (array == value).all()


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("axis", [0, (0, 2), (0, 1)])
def test_size_from_the_first_input(comm: CommunicatorBase, axis: int | tuple[int, ...]) -> None:
    own = MultiNodeBatchNormalization(None, comm, dtype="f8", axis=axis)
    alone = L.BatchNormalization(axis=axis, dtype="f8")
    assert own.avg_mean is None and own.gamma.array is None
    x = batch(0, (12, 3, 2))
    np.testing.assert_allclose(own(part(comm, x)).array, part(comm, alone(x).array), rtol=1e-9)
    assert own.gamma.shape == alone.gamma.shape
    same_state(own, alone)


@pytest.mark.mpi(1, 2)
def test_size_or_axis_is_needed(comm: CommunicatorBase) -> None:
    with pytest.raises(RuntimeError, match="size or axis"):
        MultiNodeBatchNormalization(None, comm)


@pytest.mark.mpi(1, 2)
def test_float16_and_mixed16(comm: CommunicatorBase) -> None:
    x = batch(0, dtype="f2")
    expected = L.BatchNormalization(3, dtype="f8")(x.astype("f8")).array
    for config, parameters in [("float16", np.float16), (chainer.mixed16, np.float32)]:
        with chainer.using_config("dtype", config):
            link = MultiNodeBatchNormalization(3, comm)
            y = link(part(comm, x))
        assert link.gamma.dtype == link.avg_var.dtype == parameters
        assert y.dtype == np.float16
        np.testing.assert_allclose(y.array, part(comm, expected), rtol=1e-2, atol=1e-2)


@pytest.mark.mpi(1, 2)
def test_recomputation_leaves_the_statistics(comm: CommunicatorBase) -> None:
    own, other = (MultiNodeBatchNormalization(3, comm, dtype="f8") for _ in range(2))
    x = chainer.Variable(part(comm, batch(0)))
    F.sum(F.forget(own, x) ** 3).backward()
    y = chainer.Variable(x.array)
    F.sum(other(y) ** 3).backward()
    same_state(own, other)
    np.testing.assert_allclose(x.grad, y.grad)


@pytest.mark.mpi(1, 2)
def test_evaluation_needs_no_other_rank(comm: CommunicatorBase) -> None:
    link = MultiNodeBatchNormalization(3, comm)
    if comm.rank == 0:
        with chainer.using_config("train", False):
            assert link(batch(0, dtype="f4")).shape == (12, 3)
    comm.allgather_obj(None)


@pytest.mark.mpi(1, 2)
def test_copies_share_the_communicator(comm: CommunicatorBase) -> None:
    link = MultiNodeBatchNormalization(3, comm)
    link(part(comm, batch(0, dtype="f4")))
    model = chainer.Sequential(L.Linear(3, 3), link)
    copies = [copy.deepcopy(link), copy.copy(link), *(link.copy(m) for m in ("share", "copy"))]
    copies += [copy.deepcopy(model)[1], model.copy("init")[1], model.repeat(2)[1][1]]
    for other in copies:
        assert other.comm is comm
        assert other(part(comm, batch(1, dtype="f4"))).shape[1] == 3
    assert copies[0].avg_mean is not link.avg_mean


@pytest.mark.mpi(1, 2)
def test_pickle_leaves_the_communicator_out(comm: CommunicatorBase) -> None:
    link = MultiNodeBatchNormalization(3, comm, dtype="f8")
    link(part(comm, batch(0)))
    other = pickle.loads(pickle.dumps(link))
    same_state(other, link)
    with chainer.using_config("train", False):
        np.testing.assert_array_equal(other(batch(1)).array, link(batch(1)).array)
    with pytest.raises(RuntimeError, match="assign one to its attribute `comm`"):
        other(part(comm, batch(1)))
    other.comm = comm
    other(part(comm, batch(1)))


@pytest.mark.mpi(1, 2)
def test_snapshots_are_those_of_chainer(comm: CommunicatorBase, shared_tmp_path: Any) -> None:
    own, alone = MultiNodeBatchNormalization(3, comm), L.BatchNormalization(3)
    own(part(comm, batch(0, dtype="f4")), finetune=True)
    path = shared_tmp_path / f"{comm.rank}.npz"
    chainer.serializers.save_npz(path, own)
    chainer.serializers.load_npz(path, alone)
    same_state(own, alone, 0)
    assert isinstance(own, L.BatchNormalization)


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize(
    ("backend", "message"), [("nccl", "does not use NCCL"), ("x", "'auto', 'mpi' or 'nccl'")]
)
def test_communication_backend(comm: CommunicatorBase, backend: Any, message: str) -> None:
    MultiNodeBatchNormalization(3, comm, communication_backend="mpi")
    with pytest.raises(ValueError, match=message):
        MultiNodeBatchNormalization(3, comm, communication_backend=backend)
    with pytest.raises(ValueError, match=message):
        create_mnbn_model(L.Linear(3, 3), comm, backend)
