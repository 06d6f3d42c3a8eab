"""The learning rates that lr_range.py tries, when it stops, and what it suggests."""

import re
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from PIL import Image

import chainermn

# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300


@pytest.mark.mpi(2, timeout=LIMIT)
def test_suggestion_and_curve(app, run, lists, shared_tmp_path, capsys):
    options = ["--batchsize", 8, "--lowest", 0.001, "--highest", 2, "--steps", 20]
    run(app.lr_range.main, *lists, *options, "--out", shared_tmp_path)
    lines = capsys.readouterr().out.splitlines()
    if chainermn.create_communicator().rank == 1:
        assert lines == []
        return
    assert "learning rates: 100%" in lines
    rate = re.fullmatch(r"suggestion: --lr (\S+), where the loss is least", lines[-1])[1]
    assert 0.001 < float(rate) <= 2
    assert f"curve: {shared_tmp_path / 'lr_range.png'}" in lines
    assert [path.name for path in shared_tmp_path.iterdir()] == ["lr_range.png"]
    with Image.open(shared_tmp_path / "lr_range.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.mpi(2, timeout=LIMIT)
def test_wrong_input_ends_all_ranks_with_one_line(app, fails, lists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    for options, message in (
        (["--lowest", 1, "--highest", 0.1], "below --highest, got 1.0 and 0.1"),
        (["--steps", 3], "--steps must be at least 20, got 3"),
        (["--train", "missing.txt"], "missing.txt is missing: prepare.py makes lists"),
        (["--out", "a/b"], "Not a directory: 'a/b'"),
    ):
        assert message in fails(app.lr_range.main, *lists, *options)


def test_smooth(app):
    losses = np.random.default_rng(0).random(50)
    expected = [losses[max(i - 2, 0) : i + 3].mean() for i in range(50)]
    np.testing.assert_allclose(app.lr_range.smooth(losses), expected)


def test_suggest(app):
    rates = np.geomspace(1e-3, 1, 31)
    losses = np.log10(rates / 0.1) ** 2
    assert app.lr_range.suggest(rates, losses) == pytest.approx(0.1)
    assert app.lr_range.suggest(rates, 1 / rates) == 1
    assert app.lr_range.suggest(rates, rates) is None


def test_curve_is_drawn_where_nothing_can_be_suggested(app, tmp_path):
    rates = np.geomspace(1e-3, 1, 31)
    with pytest.raises(ValueError, match="does not fall at any rate"):
        app.lr_range.report(rates, rates.tolist(), tmp_path)
    assert (tmp_path / "lr_range.png").exists()
    with pytest.raises(ValueError, match="not a number at the first rate"):
        app.lr_range.report(rates, [float("nan")], tmp_path)


def trainer_with(optimizer, loss: float) -> SimpleNamespace:
    updater = SimpleNamespace(get_optimizer=lambda name: optimizer)
    variable = chainer.Variable(np.array(loss, np.float32))
    return SimpleNamespace(updater=updater, observation={"main/loss": variable})


@pytest.mark.parametrize(
    ("losses", "steps"),
    [([2, 1, 3, 2, 1], 5), ([2, 1, 5, 1, 1], 3), ([2, 9, 1, 1, 1], 2), ([2, np.nan, 1, 1, 1], 2)],
)
def test_stops_where_the_loss_runs_away(app, losses, steps):
    comm = SimpleNamespace(rank=1, size=2, allreduce_obj=lambda loss: 2 * loss)
    optimizer = chainer.optimizers.MomentumSGD()
    test = app.lr_range.RangeTest(np.array([0.1, 0.2, 0.4, 0.8, 1.6]), 0.5, comm)
    test.initialize(trainer_with(optimizer, 0))
    rates = []
    while not test.is_over:
        rates.append(optimizer.lr)
        test(trainer_with(optimizer, losses[len(rates) - 1]))
    assert rates == [0.05, 0.1, 0.2, 0.4, 0.8][:steps]
    np.testing.assert_array_equal(test.losses, losses[:steps])
