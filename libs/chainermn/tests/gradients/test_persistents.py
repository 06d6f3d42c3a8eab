"""Persistent values: their names, those that follow rank 0, and rank 0's on all ranks."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.link_hooks import SpectralNormalization

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.gradients.persistents import bcast_persistents, named_persistents, persistents_of


class Codebook(chainer.Link):
    follow_rank_0 = ("codes", "uses")

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.add_persistent("codes", np.full(3, rank, "f"))
        self.add_persistent("uses", rank)
        self.add_persistent("mean", np.full(2, rank, "f"))


class Model(chainer.Chain):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.add_persistent("text", f"of rank {rank}")
        self.add_persistent("z", None)
        with self.init_scope():
            self.book = Codebook(rank)
            self.norm = L.BatchNormalization(2)
            self.same_norm = self.norm


def values(model: chainer.Link) -> dict[str, Any]:
    """Return all values; arrays as their dtypes and lists."""
    return {
        name: (value.dtype.name, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in named_persistents(model)
    }


def test_each_value_has_one_name() -> None:
    names = ["/book/codes", "/book/mean", "/book/uses", "/norm/N", "/norm/avg_mean"]
    names += ["/norm/avg_var", "/text", "/z"]
    model = Model()
    assert [name for name, _ in named_persistents(model)] == names
    assert dict(named_persistents(model))["/norm/avg_var"] is model.norm.avg_var
    model = chainer.Sequential(L.Linear(2, 2), L.BatchNormalization(2))
    assert named_persistents(model)[0] == ("/1/N", 0)
    with pytest.raises(TypeError, match=r"a model, which is a chainer.Link, got .*str"):
        persistents_of("model")


def following(model: chainer.Link) -> set[str]:
    return {each.path for each in persistents_of(model) if each.follows_rank_0}


def test_values_that_follow_rank_0() -> None:
    assert following(Model()) == {"/book/codes", "/book/uses"}
    layer = L.Bilinear(2, 3, 4)
    layer.add_hook(SpectralNormalization())
    layer.add_hook(SpectralNormalization(weight_name="V1", name="second"))
    third = SpectralNormalization(weight_name="V2", use_gamma=True, name="third")
    third.vector_name = "vector"
    layer.add_hook(third)
    assert following(chainer.Sequential(layer)) == {"/0/W_u", "/0/V1_u", "/0/vector"}
    layer.delete_hook("second")
    assert following(chainer.Sequential(layer)) == {"/0/W_u", "/0/vector"}
    codebook = Codebook()
    codebook.follow_rank_0 = "mean"
    assert following(codebook) == {"/mean"}
    codebook.follow_rank_0 = {"means"}
    message = r"of Codebook names \['means'\], but .* values are \['codes', 'mean', 'uses'\]"
    with pytest.raises(ValueError, match=message):
        persistents_of(codebook)


@pytest.mark.mpi(1, 2, 3)
def test_all_ranks_get_the_values_of_rank_0(comm: CommunicatorBase) -> None:
    model = Model(comm.rank)
    model.norm.avg_mean[...] = comm.rank + 0.5
    model.norm.N = comm.rank + 5
    model.book.mean = np.full(comm.rank + 1, comm.rank, "f8" if comm.rank else "f4")
    codes, mean = model.book.codes, model.norm.avg_mean
    bcast_persistents(comm, model)
    assert values(model) == {
        "/book/codes": ("float32", [0.0, 0.0, 0.0]),
        "/book/mean": ("float32", [0.0]),
        "/book/uses": 0,
        "/norm/N": 5,
        "/norm/avg_mean": ("float32", [0.5, 0.5]),
        "/norm/avg_var": ("float32", [1.0, 1.0]),
        "/text": "of rank 0",
        "/z": None,
    }
    assert model.book.codes is codes
    assert model.norm.avg_mean is mean


@pytest.mark.mpi(2, 3)
def test_values_that_only_rank_0_has(comm: CommunicatorBase) -> None:
    lazy = L.Linear(None, 2)
    lazy.add_hook(SpectralNormalization())
    model = chainer.Sequential(lazy, L.BatchNormalization(axis=0))
    if comm.rank == 0:
        model(np.ones((4, 3), "f"))
    bcast_persistents(comm, model)
    own = dict(named_persistents(model))
    assert own["/0/W_u"].shape == own["/1/avg_mean"].shape == (2,)
    vectors = comm.allgather(own["/0/W_u"])
    assert all((vector == vectors[0]).all() for vector in vectors)
    saved = chainer.serializers.DictionarySerializer()
    saved.save(model)
    assert (saved.target["0/W_u"] == vectors[0]).all()


@pytest.mark.mpi(2)
def test_only_values_that_follow_rank_0(comm: CommunicatorBase) -> None:
    model = Model(comm.rank)
    bcast_persistents(comm, model, following_only=True)
    assert (model.book.codes == 0).all()
    assert (model.book.mean == comm.rank).all()
    assert (model.book.uses, model.text) == (0, f"of rank {comm.rank}")


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("change", ["more", "other", "no model", "cannot be pickled"])
def test_models_that_differ(comm: CommunicatorBase, change: str) -> None:
    model: Any = Model(comm.rank)
    if comm.rank == 1 and change == "more":
        model.add_persistent("zz", 1)
    if comm.rank == 1 and change == "other":
        model.book.add_persistent("d", 1)
    if comm.rank == 1 and change == "no model":
        model = None
    if comm.rank == 0 and change == "cannot be pickled":
        model.text = lambda: None
    error, message = {
        "more": (ValueError, "the model must .* has /zz"),
        "other": (ValueError, "the model must .* has /book/d"),
        "no model": (TypeError, "expected a model"),
        "cannot be pickled": (TypeError, "bcast_obj: rank 0: cannot pickle"),
    }[change]
    with pytest.raises(error, match=message):
        bcast_persistents(comm, model, "bcast")
