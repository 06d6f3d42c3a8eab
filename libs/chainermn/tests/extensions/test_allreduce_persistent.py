"""Running statistics averaged over the ranks."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import SpectralNormalization

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import AllreducePersistent


class Model(chainer.Chain):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.add_persistent("single", np.full((2, 3), rank, "f4"))
        self.add_persistent("half", np.full(2, rank, "f2"))
        self.add_persistent("count", np.full(2, rank))
        self.add_persistent("number", float(rank))
        self.add_persistent("text", str(rank))
        with self.init_scope():
            self.norm = L.BatchNormalization(3, dtype=np.float64)
        generator = np.random.default_rng(rank)
        self.norm.avg_mean[...] = generator.normal(size=3)
        self.norm.avg_var[...] = generator.normal(size=3) ** 2
        self.norm.N = rank


@pytest.mark.mpi(1, 3)
def test_floats_are_averaged_in_place(comm: CommunicatorBase) -> None:
    model = Model(comm.rank)
    arrays = model.single, model.norm.avg_mean
    extension = AllreducePersistent(model, comm)
    for _ in range(2):
        extension()
    mean = (comm.size - 1) / 2
    assert (model.single is arrays[0]) and (model.norm.avg_mean is arrays[1])
    assert (model.single == mean).all()
    assert (model.half == mean).all()
    assert model.half.dtype == np.float16
    replicas = [Model(rank).norm for rank in range(comm.size)]
    for name in ("avg_mean", "avg_var"):
        expected = np.mean([getattr(replica, name) for replica in replicas], axis=0)
        np.testing.assert_allclose(getattr(model.norm, name), expected, rtol=1e-14)
    assert (model.count == comm.rank).all()
    assert (model.number, model.text, model.norm.N) == (comm.rank, str(comm.rank), comm.rank)


def test_comes_before_evaluators_and_snapshots(comm: CommunicatorBase) -> None:
    extension = AllreducePersistent(chainer.Chain(), comm)
    assert extension.trigger == (1, "epoch")
    assert extension.priority > chainer.training.extensions.Evaluator.priority
    assert extension() is None


@pytest.mark.mpi(3)
def test_models_that_differ(comm: CommunicatorBase) -> None:
    model = Model(comm.rank)
    if comm.rank == 1:
        model.add_persistent("more", np.zeros(2))
    with pytest.raises(ValueError, match=r"rank 0 and rank 1 differ in \[\('//?more'"):
        AllreducePersistent(model, comm)()


class Normalized(chainer.Chain):
    """Two layers whose weights have the singular values 9, 3 and 1, and batch normalization."""

    follow_rank_0 = ("version",)

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        self.add_persistent("version", rank)
        generator = np.random.default_rng(seed)
        rotation, turn = (np.linalg.qr(generator.normal(size=(3, 3)))[0] for _ in range(2))
        weight = rotation @ np.diag([9.0, 3.0, 1.0]) @ turn
        np.random.seed(10 * seed + rank)
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.one = L.Linear(3, 3, initialW=weight, nobias=True)
            self.other = L.Linear(3, 3, initialW=weight, nobias=True)
            self.norm = L.BatchNormalization(3)
        self.one.add_hook(SpectralNormalization())
        hook = SpectralNormalization(name="other")
        hook.vector_name = "vector"
        self.other.add_hook(hook)

    def forward(self, x: np.ndarray) -> chainer.Variable:
        return self.norm(self.other(self.one(x)))


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize(("seed", "opposite"), [(0, True), (1, False), (2, False)])
def test_spectral_normalization(comm: CommunicatorBase, seed: int, opposite: bool) -> None:
    model = Normalized(comm.rank, seed)
    for step in range(12):
        model(np.random.default_rng([comm.rank, step]).normal(size=(5, 3)))
    vectors = model.one.W_u, model.other.vector
    if opposite:
        for vector in vectors:
            vector *= (-1) ** comm.rank * np.sign(vector[0])
    vectors_of_rank_0 = comm.bcast_obj(vectors)
    statistics = np.stack(comm.allgather_obj([model.norm.avg_mean, model.norm.avg_var]))
    AllreducePersistent(model, comm)()
    np.testing.assert_array_equal(vectors, vectors_of_rank_0)
    means = np.mean(statistics, axis=0)
    np.testing.assert_allclose([model.norm.avg_mean, model.norm.avg_var], means, rtol=1e-14)
    assert model.version == 0
    with chainer.using_config("train", False):
        for layer in (model.one, model.other):
            weight = layer(np.eye(3)).array
            assert np.linalg.svd(weight, compute_uv=False)[0] == pytest.approx(1, rel=1e-6)


@pytest.mark.mpi(2)
def test_a_hook_on_one_rank_only(comm: CommunicatorBase) -> None:
    model = chainer.Sequential(L.Linear(3, 3))
    if comm.rank == 1:
        model[0].add_hook(SpectralNormalization())
    message = "the model must have the same persistent values on all ranks, .* has /0/W_u"
    with pytest.raises(ValueError, match=message):
        AllreducePersistent(model, comm)()
