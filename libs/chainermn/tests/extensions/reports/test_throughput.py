"""Throughput: items per second, counting only the time spent in steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chainer
import pytest
from chainer.training import make_extension

from chainermn.extensions import Throughput
from chainermn.extensions.reports import throughput
from libs.chainermn.tests.extensions.reports import trainers


class Clock:
    """A clock that advances only when a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def make_trainer(clock: Clock, out: Path, epochs: int, reporter: Any) -> Any:
    """Return a trainer that spends 2 seconds per step, and 100 more after each epoch."""
    trainer = trainers.make_trainer(out, epochs)
    core = trainer.updater.update_core

    def step() -> None:
        core()
        clock.now += 2

    trainer.updater.update_core = step

    @make_extension(trigger=(1, "epoch"), priority=300)
    def evaluate(_: Any) -> None:
        clock.now += 100

    trainer.extend(evaluate)
    trainer.extend(reporter)
    return trainer


@pytest.mark.parametrize(
    ("of_a_step", "n_ranks", "expected"), [(8, 1, 4), (8, 3, 12), ("examples", 3, 3)]
)
def test_speed(
    clock: Clock, tmp_path: Path, of_a_step: Any, n_ranks: int, expected: float
) -> None:
    reporter = Throughput("images", of_a_step, n_ranks)
    make_trainer(clock, tmp_path, 2, reporter).run()
    log = json.loads((tmp_path / "log").read_text())
    assert [row["images/s"] for row in log] == [expected] * 2
    assert log[0]["minutes left"] > 0
    assert log[1]["minutes left"] == 0


def test_interval_in_the_middle_of_which_a_run_goes_on(clock: Clock, tmp_path: Path) -> None:
    first = make_trainer(clock, tmp_path, 1, Throughput("images", 8))
    first.stop_trigger = chainer.training.get_trigger((2, "iteration"))
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    rest = Throughput("images", 20)
    second = make_trainer(clock, tmp_path, 1, rest)
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", second, strict=False)
    assert rest.speed() == {"images/s": 16 / 4}
    second.run()
    (row,) = json.loads((tmp_path / "log").read_text())
    assert (row["iteration"], row["images/s"]) == (3, (16 + 20) / (4 + 2))


def test_training_of_unknown_length(clock: Clock, tmp_path: Path) -> None:
    trainer = make_trainer(clock, tmp_path, 1, Throughput("images", 8))
    trainer.stop_trigger = lambda trainer: trainer.updater.iteration == 3
    trainer.run()
    (row,) = json.loads((tmp_path / "log").read_text())
    assert row["images/s"] == 4
    assert "minutes left" not in row
