"""Random generators are found where data sets have them, and draw again what they drew."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chainer.datasets import SubDataset, TransformDataset

from chainermn.extensions import generators

MODULES_OWN = np.random.default_rng(5)


class Noisy:
    """A data set with a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng
        self.examples = [[0.0]] * 1000
        self.itself = self

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return i + self.rng.random()


def with_closure(rng: Any) -> Any:
    return lambda x: x + rng.random()


def with_global(x: Any) -> Any:
    return x + MODULES_OWN.random()


def add(rng: Any, x: Any) -> Any:
    return x + rng.random()


class OfClass(Noisy):
    shared = np.random.RandomState(3)

    def __getitem__(self, i: int) -> Any:
        return i + self.shared.random() + MODULES_OWN.random()


def nested(x: Any) -> Any:
    return sum([x + MODULES_OWN.random() for _ in range(2)])


@pytest.fixture(autouse=True)
def global_ones() -> Iterator[None]:
    before = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(before[0])
    random.setstate(before[1])


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (Noisy(np.random.RandomState(1)), "rng"),
        (Noisy(np.random.default_rng(1)), "rng"),
        (Noisy(np.random.Generator(np.random.MT19937(1))), "rng"),
        (Noisy(random.Random(1)), "rng"),
        (SubDataset(Noisy(random.Random(1)), 0, 2), "_dataset.rng"),
        (TransformDataset([1, 2], with_closure(np.random.default_rng(1))), "_transform.rng"),
        (TransformDataset([1, 2], with_global), "_transform.MODULES_OWN"),
        (
            TransformDataset([1, 2], functools.partial(add, np.random.RandomState(1))),
            "_transform.1",
        ),
        (TransformDataset([1, 2], Noisy(random.Random(1)).__getitem__), "_transform.self.rng"),
        (TransformDataset([1, 2], nested), "_transform.MODULES_OWN"),
        (OfClass(random.SystemRandom()), "__getitem__.MODULES_OWN shared"),
    ],
)
def test_data_draw_again_what_they_drew(data: Any, place: str) -> None:
    places = place.split()
    assert generators.generators_of(data) == places
    data[0], random.gauss(0, 1), np.random.randn()
    saved = generators.states({"main": data})
    assert list(saved) == ["numpy", "python", *(f"main.{place}" for place in places)]
    expected = [data[1], np.random.randn(), random.gauss(0, 1), random.random()]
    data[0], random.random(), np.random.rand(3)
    generators.restore({"main": data}, saved)
    assert [data[1], np.random.randn(), random.gauss(0, 1), random.random()] == expected


def test_what_is_not_there_any_more_is_left_alone() -> None:
    saved = generators.states({"main": Noisy(random.Random(1)), "other": None})
    generators.restore({}, saved)
    np.random.seed(3)
    del saved["numpy"]
    generators.restore({}, saved)
    assert np.random.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_seeded_or_not(kind: Any) -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(kind())  # type: ignore[attr-defined]
        assert not generators.is_seeded()
        saved = generators.states({})
        drawn = np.random.rand()
        generators.restore({}, saved)
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
    np.random.seed(4)
    assert generators.is_seeded()
