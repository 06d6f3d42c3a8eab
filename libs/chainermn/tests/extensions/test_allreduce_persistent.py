"""Running statistics averaged over the ranks."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest

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
