"""The best model is kept, and nothing worse takes its place."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.extensions import BestModel
from libs.chainermn.tests.extensions.reports import trainers

VALUES = (0.5, math.nan, 0.7, 0.7, 0.6)


def train(out: Path, values: Any, **arguments: Any) -> Any:
    trainer = trainers.make_trainer(out, len(values), trainers.Observe("score", values))
    trainer.extend(BestModel(model_of(trainer), "score", **arguments))
    return trainer


def model_of(trainer: Any) -> Any:
    return trainer.updater.get_optimizer("main").target


@pytest.mark.parametrize(("mode", "epoch", "value"), [("max", 3, 0.7), ("min", 1, 0.5)])
def test_best_of_a_run(tmp_path: Path, mode: str, epoch: int, value: float) -> None:
    train(tmp_path, VALUES, mode=mode).run()
    with np.load(tmp_path / "best.npz") as saved:
        assert saved["b"] == 3 * epoch  # the model has counted the iterations
    about = json.loads((tmp_path / "best.json").read_text())
    assert about == {
        "metric": "score",
        "value": value,
        "loss": 1,
        "epoch": epoch,
        "iteration": 3 * epoch,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.json", "best.npz", "log"]


def test_of_equal_values_the_lower_loss_wins_also_after_resuming(tmp_path: Path) -> None:
    epochs = [(0.7, 2.0), (0.7, 1.0), (0.7, 1.5), (0.7, 0.5), (0.6, 0.1), (0.7, math.nan)]
    first = train_on_accuracy(tmp_path, epochs[:2])
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    for n_epochs, best in ((3, 2), (6, 4)):
        resumed = train_on_accuracy(tmp_path, epochs[:n_epochs])
        chainer.serializers.load_npz(tmp_path / "snapshot.npz", resumed)
        resumed.run()
        about = json.loads((tmp_path / "best.json").read_text())
        assert (about["epoch"], about["value"], about["loss"]) == (best, *epochs[best - 1])


def test_loss_that_is_not_a_number_does_not_stay(tmp_path: Path) -> None:
    train_on_accuracy(tmp_path, [(0.7, math.nan), (0.7, 3.0)]).run()
    assert json.loads((tmp_path / "best.json").read_text())["loss"] == 3


def test_snapshot_without_a_loss_is_loaded(tmp_path: Path) -> None:
    first = train_on_accuracy(tmp_path, [(0.7, 2.0)])
    first.run()
    saved = chainer.serializers.npz.serialize(first)
    del saved["extensions/BestModel/loss"]
    np.savez(tmp_path / "old.npz", **saved)
    resumed = train_on_accuracy(tmp_path, [(0.7, 2.0)])
    chainer.serializers.load_npz(tmp_path / "old.npz", resumed)
    best = resumed.get_extension("BestModel")
    assert (best.value, best.loss) == (0.7, math.inf)


def train_on_accuracy(out: Path, epochs: Any) -> Any:
    @chainer.training.make_extension(trigger=(1, "epoch"), priority=300)
    def evaluate(trainer: Any) -> None:
        accuracy, loss = epochs[trainer.updater.epoch - 1]
        chainer.report({"validation/main/accuracy": accuracy, "validation/main/loss": loss})

    trainer = trainers.make_trainer(out, len(epochs), evaluate)
    trainer.extend(BestModel(model_of(trainer), "validation/main/accuracy"))
    return trainer


def test_model_is_not_compressed(tmp_path: Path) -> None:
    train(tmp_path, VALUES[:1]).run()
    with zipfile.ZipFile(tmp_path / "best.npz") as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}


def test_resumed_run_knows_the_best(tmp_path: Path) -> None:
    first = train(tmp_path, VALUES[:3], filename="top.npz")
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    (tmp_path / "top.json").unlink()
    second = train(tmp_path, VALUES, filename="top.npz")
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", second)
    second.run()
    assert second.updater.epoch == 5
    assert not (tmp_path / "top.json").exists()  # nothing was better
    best = second.get_extension("BestModel")
    assert (best.value, best.epoch, best.iteration) == (0.7, 3, 9)


def test_run_that_goes_on_in_another_folder_has_a_best_model_there(tmp_path: Path) -> None:
    first = train(tmp_path / "first", VALUES[:3])
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    second = train(tmp_path / "second", (*VALUES[:3], 0.2, 0.1))
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", second)
    second.run()
    about = json.loads((tmp_path / "second/best.json").read_text())
    assert (about["value"], about["epoch"]) == (0.2, 4)
    assert (tmp_path / "second/best.npz").exists()


def test_value_that_is_not_observed(tmp_path: Path) -> None:
    trainer = trainers.make_trainer(tmp_path, 1)
    trainer.extend(BestModel(model_of(trainer), "score"))
    with pytest.raises(KeyError, match=r"'score' was not observed in iteration 3, but .*loss"):
        trainer.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"mode": "auto"}, "mode must be"), ({"filename": "best"}, r"must end with \.npz")],
)
def test_invalid_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BestModel(chainer.links.Bias(0, ()), "score", **arguments)
