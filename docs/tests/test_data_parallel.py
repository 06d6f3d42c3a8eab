"""The example that does without ChainerMN computes the same bits as ChainerMN does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import chainer
import chainer.links as L
import numpy as np
import pages
import pytest
from loading import load
from on_ranks import EXAMPLES, lines_here, mpi

import chainermn

EXAMPLE = EXAMPLES / "data_parallel.py"
WAYS = ["naive", "with_buckets", "overlapped"]


@pytest.fixture
def example() -> ModuleType:
    return load(EXAMPLE)


def test_it_is_short_and_imports_only_numpy_and_mpi4py():
    text = pages.read(EXAMPLE)
    assert len(text.splitlines()) <= 120
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert modules == {"collections.abc", "mpi4py", "numpy", "numpy.typing"}


@mpi(1)
def test_one_rank_learns_the_same_as_two():
    """The page shows what two ranks print, and is tested as all pages are."""
    (command,) = (b for b in pages.marked("run: mpiexec") if EXAMPLE.name in b.text)
    assert lines_here(EXAMPLE) == pages.printed_by(command)


@mpi(1)
def test_buckets_are_sent_during_backward(example):
    """On a stand-in for a communicator, which notes what happens."""
    events = []

    def start(_, buffer: np.ndarray) -> SimpleNamespace:
        events.append(f"send {buffer.size}")
        wait = partial(events.append, f"wait {buffer.size}")
        return SimpleNamespace(Test=lambda: None, Wait=wait)

    def backward() -> Iterator[np.ndarray]:
        for size in (1000, 24, 2000, 10):
            events.append(f"compute {size}")
            yield np.full(size, 6, np.float32)

    comm = SimpleNamespace(size=2, Iallreduce=start)
    found = example.overlapped(comm, backward())
    assert [(array.size, *set(array)) for array in found] == [(n, 3) for n in (1000, 24, 2000, 10)]
    computed = ["compute 1000", "compute 24", "send 1024", "compute 2000", "send 2000"]
    assert events == [*computed, "compute 10", "send 10", "wait 1024", "wait 2000", "wait 10"]


# The bits


def any_floats(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw floats with random bits, and many whose sum is NaN, infinite or subnormal."""
    floats = random.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-40, 0, -0.0], np.float32)
    return np.where(random.random(shape) < 0.2, random.choice(special, shape), floats)


def floats_with_exact_sums(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (random.integers(-1000, 1001, shape) / 128).astype(np.float32)


def bits(arrays: Iterable[np.ndarray]) -> bytes:
    """Return the bits of all elements, with the same bits for every NaN."""
    flat = np.concatenate([array.ravel() for array in arrays])
    return np.where(np.isnan(flat), np.float32(np.nan), flat).tobytes()


def averaged(
    arrays: chainer.ChainList, gradients: Iterable[np.ndarray], average: Callable[[], object]
) -> list[np.ndarray]:
    """Give arrays of Chainer's their gradients, and return the gradients after averaging."""
    for link, gradient in zip(arrays, gradients, strict=True):
        link.W.grad = gradient
    average()
    return [link.W.grad for link in arrays]


@pytest.mark.each_mpi
@mpi(2, 3, 4)
def test_means_have_the_bits_of_the_library(example, mpi_ranks):
    comm = chainermn.create_communicator("naive")
    random = np.random.default_rng(comm.rank)
    draw = any_floats if mpi_ranks == 2 else floats_with_exact_sums
    own = [draw(random, start.shape) for start in example.START[::-1]]
    model = chainer.ChainList(*(L.Parameter(array) for array in own))
    copies = [array.copy() for array in own]
    means = averaged(model, copies, lambda: comm.multi_node_mean_grad(model))
    for way in WAYS:
        gradients = (array.copy() for array in own)
        found = getattr(example, way)(example.MPI.COMM_WORLD, gradients)
        assert [array.shape for array in found] == [array.shape for array in own]
        assert bits(found) == bits(means)


@mpi(2)
def test_training_ends_with_the_bits_of_the_library(example):
    comm = chainermn.create_communicator("naive")
    model = chainer.ChainList(*(L.Parameter(start.copy()) for start in example.START[::-1]))
    optimizer = chainer.optimizers.SGD(example.RATE)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)
    averaged(model, example.START[::-1], optimizer.update)  # makes the ranks equal, no step

    def by_library(_, backward: Iterator[np.ndarray]) -> list[np.ndarray]:
        return averaged(model, backward, optimizer.update)

    _, losses = example.train(example.MPI.COMM_WORLD, by_library)
    expected = bits(link.W.array for link in list(model)[::-1])
    assert optimizer.t == example.STEPS
    for way in WAYS:
        parameters, found = example.train(example.MPI.COMM_WORLD, getattr(example, way))
        assert found.tolist() == losses.tolist()
        assert comm.allgather_obj(bits([parameters])) == [expected] * comm.size
