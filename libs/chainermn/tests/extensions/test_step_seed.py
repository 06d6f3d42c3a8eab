"""The random numbers of a step depend only on the seed, the rank and the iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.extensions import StepSeed
from libs.chainermn.tests.extensions import training


def drawn(comm: Any, out: Path, iterations: int, seed: int, file: Any = None) -> Any:
    """Return the number drawn in each step, and the trainer."""
    trainer = training.make_trainer(comm, out, iterations, seed=iterations)
    trainer.extend(StepSeed(seed, comm))
    trainer.extend(lambda _: np.random.rand(3), name="evaluator", trigger=(2, "iteration"))
    numbers: list[float] = []
    update = trainer.updater.update_core

    def draw() -> None:
        numbers.append(float(np.random.rand()))
        update()

    trainer.updater.update_core = draw
    if file is not None:
        chainer.serializers.load_npz(file, trainer)
    trainer.run()
    return numbers, trainer


@pytest.mark.mpi(1, 3)
def test_numbers_of_each_step(comm: Any, shared_tmp_path: Path) -> None:
    out = shared_tmp_path
    whole, _ = drawn(comm, out, 5, seed=1)
    again, trainer = drawn(comm, out, 3, seed=1)
    assert whole[:3] == again
    file = out / f"snapshot.{comm.rank}.npz"
    chainer.serializers.save_npz(file, trainer)
    resumed, _ = drawn(comm, out, 5, seed=1, file=file)
    assert resumed == whole[3:]
    others, _ = drawn(comm, out, 5, seed=2)
    everywhere = [n for numbers in comm.allgather_obj(whole + others) for n in numbers]
    assert len(set(everywhere)) == 10 * comm.size


def test_updater_with_optimizers_of_other_names(comm: Any) -> None:
    optimizers = {
        name: chainer.optimizers.SGD().setup(chainer.links.Linear(2, 1))
        for name in ("generator", "discriminator")
    }
    iterator = chainer.iterators.SerialIterator(np.zeros((4, 2), np.float32), 2)
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(iterator, optimizers))
    seed = StepSeed(1, comm)
    seed(trainer)
    first = np.random.rand()
    seed(trainer)
    assert np.random.rand() == first
