"""The networks to measure, in Chainer."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from benchmarks.networks import CHANNELS, CLASSES, DIGITS_UNITS, INPUT_SHAPES, MLP_UNITS, POOLED

_APP = Path(__file__).resolve().parents[2] / "apps/imagenet"


@dataclass(frozen=True)
class Network:
    model: chainer.Link
    input_shape: tuple[int, ...]

    def examples(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return random examples: inputs and their classes."""
        random = np.random.default_rng(0)
        x = random.normal(size=(n, *self.input_shape)).astype(np.float32)
        return x, random.integers(0, 10, n).astype(np.int32)


def make(name: str) -> Network:
    """Return a network by its name. ``array of 4000`` has one parameter of 4000 bytes."""
    if name.startswith("array of "):
        return Network(array(int(name.split()[-1])), ())
    return Network(_MAKERS[name](), INPUT_SHAPES[name])


def array(n_bytes: int) -> chainer.Link:
    link = chainer.Link()
    with link.init_scope():
        link.array = chainer.Parameter(np.zeros(n_bytes // 4, np.float32))
    return link


def mlp(units: Sequence[int]) -> chainer.Link:
    first, *others = (L.Linear(n_in, n_out) for n_in, n_out in itertools.pairwise(units))
    layers = [layer for linear in others for layer in (F.relu, linear)]
    return chainer.Sequential(first, *layers)


def conv() -> chainer.Link:
    layers: list[Callable[..., chainer.Variable]] = []
    for index, (n_in, n_out) in enumerate(itertools.pairwise(CHANNELS)):
        layers += [L.Convolution2D(n_in, n_out, 3, pad=1), F.relu]
        if index in POOLED:
            layers.append(lambda h: F.max_pooling_2d(h, 2))
    features = CHANNELS[-1] * 4
    layers += [L.Linear(features, features), F.relu, L.Linear(features, CLASSES)]
    return chainer.Sequential(*layers)


def resnet50() -> chainer.Link:
    sys.path.insert(0, str(_APP))
    from models.resnet import ChainersResNet50

    return ChainersResNet50(1000)


_MAKERS: Mapping[str, Callable[[], chainer.Link]] = {
    "digits": lambda: mlp(DIGITS_UNITS),
    "mlp": lambda: mlp(MLP_UNITS),
    "conv": conv,
    "resnet50": resnet50,
}
