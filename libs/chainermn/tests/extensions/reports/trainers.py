"""A trainer that observes given values, for tests of the extensions that report them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training import Extension, StandardUpdater, Trainer


class Observe(Extension):
    """An extension that reports the next of its values in each epoch, as an evaluator does."""

    trigger = 1, "epoch"
    priority = 300

    def __init__(self, name: str, values: Sequence[float]) -> None:
        self.key, self.values = name, values

    def __call__(self, trainer: Trainer) -> None:
        """Report."""
        chainer.report({self.key: self.values[trainer.updater.epoch - 1]})


def make_trainer(out: Path, epochs: int, observe: Extension | None = None) -> Any:
    """Return a trainer with three iterations per epoch; its model counts the iterations."""
    model = chainer.links.Bias(0, ())

    def loss(_: np.ndarray) -> chainer.Variable:
        chainer.report({"loss": 1.0, "examples": 2})
        return -model.b + 0

    optimizer = chainer.optimizers.SGD(1).setup(model)
    batches = chainer.iterators.SerialIterator(np.zeros(6, np.float32), 2, shuffle=False)
    trainer = Trainer(
        StandardUpdater(batches, optimizer, loss_func=loss), (epochs, "epoch"), out=str(out)
    )
    trainer.extend(chainer.training.extensions.LogReport())
    if observe is not None:
        trainer.extend(observe, name="observe")
    return trainer
