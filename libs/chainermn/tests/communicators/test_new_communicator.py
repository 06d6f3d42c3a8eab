"""A user-defined communicator: the documentation's example, and mistakes in registering one."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import register, registered, registry
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

EXAMPLE = Path(__file__).parents[4] / "docs/examples/two_step_communicator.py"
WORLD = MPI.COMM_WORLD
LAYOUTS = {1: ["a"], 2: ["aa", "ab"], 3: ["aaa", "abc"], 4: ["aaaa", "aabb", "abab", "abcd"]}


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[None]:
    spec = importlib.util.spec_from_file_location("two_step_communicator", EXAMPLE)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    # Tests in other modules expect only the library's own communicators.
    del registry.classes["two_step"]


def mean(hosts: str, gradients: list[np.ndarray], place: Any, **settings: Any) -> np.ndarray:
    """Return the mean of the ranks' gradients, in host memory."""
    topology = Topology.from_hosts(hosts, WORLD.rank)
    comm = registered()["two_step"](WORLD, topology=topology, **settings)
    model = chainer.Chain()
    with model.init_scope():
        model.p = chainer.Parameter(place(np.zeros_like(gradients[0])))
    model.p.grad = place(gradients[comm.rank])
    comm.multi_node_mean_grad(model)
    comm.finalize()
    return np.asarray(model.p.grad).view(np.ndarray)


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_example(on_gpu: bool, request: pytest.FixtureRequest, mpi_ranks: int) -> None:
    place = request.getfixturevalue("stand_in").to_gpu if on_gpu else np.array
    generator = np.random.default_rng(0)
    gradients = [generator.normal(size=(5, 7)).astype("f") for _ in range(mpi_ranks)]
    expected = np.mean([each.astype("f8") for each in gradients], axis=0)
    for hosts in LAYOUTS[mpi_ranks]:
        np.testing.assert_allclose(mean(hosts, gradients, place), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.mpi(2, 4)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_example_in_float16(on_gpu: bool, request: pytest.FixtureRequest, mpi_ranks: int) -> None:
    place = request.getfixturevalue("stand_in").to_gpu if on_gpu else np.array
    # 1 + 2 ** -12 has too many digits for float16.
    gradients = [np.full(3, (1 + 2**-12) * 2**rank, "f") for rank in range(mpi_ranks)]
    exact = (1 + 2**-12) * (2**mpi_ranks - 1) / mpi_ranks
    rounded = np.float32(exact).astype("f2")
    between_hosts = mean("ab" * (mpi_ranks // 2), gradients, place, allreduce_grad_dtype="f2")
    assert np.abs(between_hosts - rounded).max() <= np.spacing(rounded)
    assert (between_hosts != np.float32(exact)).all()


@pytest.mark.mpi(3)
def test_example_says_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match=r"as many ranks on every host, got \(2, 1\)"):
        mean("aab", [np.zeros(1, "f")] * 3, np.array)


@pytest.mark.mpi(2)
def test_by_name() -> None:
    comm = chainermn.create_communicator("two_step")
    assert type(comm) is registered()["two_step"]
    with pytest.raises(ValueError, match="did you mean 'two_step'"):
        chainermn.create_communicator("two_steps")


def test_names_that_are_taken() -> None:
    register("naive", NaiveCommunicator)  # the same class again
    with pytest.raises(ValueError, match="'naive' belongs to NaiveCommunicator; choose another"):
        register("naive", registered()["flat"])


@pytest.mark.parametrize("kind", [chainer.Chain, NaiveCommunicator.average, "naive"])
def test_what_is_no_communicator(kind: Any) -> None:
    with pytest.raises(TypeError, match="expected a subclass of MpiCommunicatorBase, got"):
        register("other", kind)


def test_each_algorithm_is_one_short_file() -> None:
    folder = Path(inspect.getfile(NaiveCommunicator)).parent
    files = {path.name.removesuffix("_communicator.py"): path for path in folder.glob("*.py")}
    for name in registered().keys() - {"two_step"}:
        assert len(files[name].read_text().splitlines()) <= 60, name
