"""Searches on a few ranks, with trials that are pruned, fail or are killed on purpose."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from optuna.trial import TrialState

from chainermn.testing.mpiexec import direct_environment

HERE = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
TINY = ["--examples", "60", "--epoch", "2", "--batchsize", "9"]

# Runs the search; trial 1 is pruned after its first epoch, and trial 2 fails. In the folder
# "kill", rank 1 is killed in trial 3. Each rank records the values of its trials, and how many
# iterations they took.
SEARCH = """
import json, os, runpy, signal, sys
from pathlib import Path
sys.path[0] = {here!r}
import chainer, optuna
import study, training

optuna.pruners.MedianPruner.prune = lambda self, study, trial: trial.number == 1
suggest, create, run = study.suggest, training.create_trainer, chainer.training.Trainer.run

def suggest_too_much(trial):
    return {{**suggest(trial), **({{"lr": float("inf")}} if trial.number == 2 else {{}})}}

def note(what):
    from mpi4py import MPI
    with open(f"rank{{MPI.COMM_WORLD.rank}}", "a") as file:
        print(json.dumps(what), file=file)

def create_and_note(args, comm, device, images):
    names = "lr", "weight_decay", "dropout", "unit"
    note([Path(args.out).name, [vars(args)[name] for name in names]])
    made = create(args, comm, device, images)
    if Path.cwd().name == "kill" and args.out.endswith("_003") and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

def run_and_note(self):
    run(self)
    note([Path(self.out).name, self.updater.iteration])

study.suggest, training.create_trainer = suggest_too_much, create_and_note
chainer.training.Trainer.run = run_and_note
runpy.run_path(os.path.join(sys.path[0], "search.py"), run_name="__main__")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("script") / "search.py"
    path.write_text(SEARCH.format(here=str(HERE)))
    return path


def read_table(out: Path) -> dict[int, dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return {int(row.pop("trial")): row for row in csv.DictReader(file)}


def read_notes(folder: Path, rank: int) -> list:
    return [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]


def values_of(notes: list) -> dict[str, list[float]]:
    return {trial: what for trial, what in notes if isinstance(what, list)}


@pytest.fixture(scope="module")
def three_ranks(script, start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three_ranks")
    job = start(3, script, *TINY, "--trials", 5, cwd=folder)
    return job, folder, [read_notes(folder, rank) for rank in range(3)]


@pytest.mark.each_mpi
def test_all_ranks_train_the_same_trials_and_end_them_together(three_ranks):
    _, _, (notes, *others) = three_ranks
    assert others == [notes, notes]
    assert list(values_of(notes)) == [f"trial_{n:03}" for n in range(5)]
    assert len({tuple(values) for values in values_of(notes).values()}) == 5
    # Each rank has 18 images: two iterations per epoch.
    assert [what for _, what in notes if isinstance(what, int)] == [4, 2, 2, 4, 4]


def test_pruned_and_failed_trials_do_not_end_the_search(three_ranks):
    job, folder, notes = three_ranks
    table = read_table(folder / "result")
    assert [row["state"] for row in table.values()] == [
        "complete",
        "pruned",
        "failed",
        "complete",
        "complete",
    ]
    assert [int(row["epochs"]) for row in table.values()] == [2, 1, 0, 2, 2]
    for number, values in enumerate(values_of(notes[0]).values()):
        row = table[number]
        found = [float(row[name]) for name in ("lr", "weight_decay", "dropout", "unit")]
        assert found[1:] == values[1:]
        assert found[0] == values[0] or number == 2
    lines = job.stdout.splitlines()
    assert lines[1].split()[:3] == ["trial", "lr", "weight_decay"]
    assert [line.split()[0] for line in lines[2:7]] == list("01234")
    assert lines[-1].startswith("table, picture and study: ")


def test_what_the_best_trial_leaves(three_ranks, app):
    job, folder, _ = three_ranks
    table = read_table(folder / "result")
    complete = {
        n: float(row["accuracy"]) for n, row in table.items() if row["state"] == "complete"
    }
    best = max(complete, key=complete.get)
    row = table[best]
    assert f"the best: trial {best}, {complete[best]:.2%} of the validation images" in job.stdout
    assert f"train.py --lr {float(row['lr']):.4g} --weight-decay" in job.stdout
    out = folder / f"result/trial_{best:03}"
    assert json.loads((out / "best.json").read_text())["value"] == complete[best]
    arguments = app.predict.read_arguments(out / "best.npz")
    assert arguments["unit"] == int(row["unit"])
    network = app.model.ResNet(arguments["unit"], 10, 0)
    app.model.load_weights((out / "best.npz").read_bytes(), out / "best.npz", network)
    assert (folder / "result/trials.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_second_start_goes_on_with_the_study(three_ranks, script, start):
    _, folder, _ = three_ranks
    before = read_table(folder / "result")
    start(3, script, *TINY, "--trials", 4, cwd=folder)  # there are more than that already
    assert read_table(folder / "result") == before
    start(2, script, *TINY, "--trials", 6, cwd=folder)
    after = read_table(folder / "result")
    assert list(after) == list(range(6))
    assert {n: after[n] for n in range(5)} == before
    job = start(2, script, *TINY[:-1], "8", cwd=folder, fails=True)
    assert "error: the study was begun with other settings (batchsize: 9, now 8)" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.each_mpi
def test_killed_search_that_is_started_again_tries_the_same(three_ranks, script, tmp_path):
    (tmp_path / "kill").mkdir()
    command = ["-m", "chainermn", "launch", "-n", "2", "--max-restarts", "1"]
    shown = subprocess.run(
        [sys.executable, *command, script, *TINY, "--trials", "5"],
        cwd=tmp_path / "kill",
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 0, shown
    table = read_table(tmp_path / "kill/result")
    assert list(table) == [0, 1, 2, 4, 5]
    expected = list(values_of(three_ranks[2][0]).values())
    for rank in (0, 1):
        tried = values_of(read_notes(tmp_path / "kill", rank))
        assert list(tried.values()) == [*expected[:4], expected[3], expected[4]]


def test_groups_of_ranks_share_the_trials(three_ranks, script, start, tmp_path):
    options = ["--trials", 5, "--ranks-per-trial", 2]
    job = start(4, script, *TINY, *options, "--quiet", cwd=tmp_path)
    assert job.stdout == ""
    notes = [read_notes(tmp_path, rank) for rank in range(4)]
    assert notes[0] == notes[1]
    assert notes[2] == notes[3]
    tried = [values_of(notes[rank]) for rank in (0, 2)]
    assert all(tried)  # neither group is idle
    assert sorted([*tried[0], *tried[1]]) == [f"trial_{n:03}" for n in range(5)]
    assert {**tried[0], **tried[1]} == values_of(three_ranks[2][0])
    assert sorted(read_table(tmp_path / "result")) == list(range(5))


def test_ranks_that_cannot_be_divided_are_refused(start, tmp_path):
    options = ["--ranks-per-trial", 2]
    job = start(3, "search.py", *TINY, *options, cwd=tmp_path, fails=True)
    assert "error: --ranks-per-trial must divide the number of ranks, 3" in job.stderr
    assert "Traceback" not in job.stderr


def search(study_of, n: int) -> list[dict]:
    """Search without training: compute the accuracy from the values. Return all values."""
    tried = []
    while asked := study_of.ask():
        _, values = asked
        accuracy = 1 / (1 + abs(math.log(values["lr"] / 0.3))) - values["dropout"] / 10
        study_of.report(1, 1.0, accuracy)
        study_of.tell(TrialState.COMPLETE, accuracy)
        tried.append(values)
    assert len(study_of.trials()) == n
    return tried


def test_a_study_that_is_opened_again_is_searched_as_an_unbroken_one(app, tmp_path):
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = search(app.study.Study(tmp_path / "whole", 20, seed=1), 20)
    first = search(app.study.Study(tmp_path / "parts", 7, seed=1), 7)
    lost = app.study.Study(tmp_path / "parts", 20, seed=1).ask()
    again = app.study.Study(tmp_path / "parts", 20, seed=1)
    again.repeat_lost()
    rest = search(again, 20)
    assert lost[1] == rest[0]
    assert first + rest == whole
    assert len({json.dumps(values) for values in whole}) == 20
    # The second half has learned from the first.
    mean = [sum(abs(math.log(v["lr"] / 0.3)) for v in part) for part in (whole[:10], whole[10:])]
    assert mean[1] < mean[0]


def test_a_trial_with_an_infinite_loss_fails(app, tmp_path):
    study = app.study.Study(tmp_path, 1, seed=0)
    study.ask()
    assert study.report(1, 2.0, 0.5) == TrialState.COMPLETE
    assert study.report(2, float("nan"), 0.5) == TrialState.FAIL
    assert study.report(2, float("inf"), 0.5) == TrialState.FAIL
