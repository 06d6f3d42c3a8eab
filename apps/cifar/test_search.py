"""Searches on a few ranks, with trials that are pruned, fail or are killed on purpose."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import chainer
import optuna
import pytest
from optuna.trial import TrialState

import chainermn
from chainermn.testing.mpiexec import direct_environment

HERE = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
TINY = ["--examples", "60", "--epoch", "2", "--batchsize", "9"]
VALUES = "lr", "weight_decay", "dropout", "unit"


@pytest.fixture
def expected(app, tmp_path) -> list[list[float]]:
    """Return the values of the first five trials, which do not depend on results."""
    study = app.study.Study(tmp_path, 5, seed=0)
    return [[values[name] for name in VALUES] for _, values in iter(study.ask, None)]


def change_trials(patch: pytest.MonkeyPatch, app) -> list[tuple[str, list[float] | int]]:
    """Have trial 1 pruned after its first epoch, and trial 2 fail.

    Return a list that will have, for each trial of this rank, its values and how many iterations
    it took.
    """
    suggest, create = app.study.suggest, app.training.create_trainer
    run = chainer.training.Trainer.run
    notes = []

    def suggest_too_much(trial):
        return {**suggest(trial), **({"lr": float("inf")} if trial.number == 2 else {})}

    def create_and_note(args, *others):
        if not notes:  # no group is done before the others have begun
            chainermn.create_communicator("naive").mpi_comm.Barrier()
        notes.append((Path(args.out).name, [vars(args)[name] for name in VALUES]))
        return create(args, *others)

    def run_and_note(trainer):
        run(trainer)
        notes.append((Path(trainer.out).name, trainer.updater.iteration))

    is_second = lambda pruner, study, trial: trial.number == 1  # noqa: E731
    patch.setattr(optuna.pruners.MedianPruner, "prune", is_second)
    patch.setattr(app.study, "suggest", suggest_too_much)
    patch.setattr(app.training, "create_trainer", create_and_note)
    patch.setattr(chainer.training.Trainer, "run", run_and_note)
    return notes


def read_table(out: Path) -> dict[int, dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return {int(row.pop("trial")): row for row in csv.DictReader(file)}


def values_of(notes: list) -> dict[str, list[float]]:
    return {trial: what for trial, what in notes if isinstance(what, list)}


@pytest.fixture(scope="module")
def searched(app, call, folder):
    """Search on all ranks; return what this rank prints, the folder, and notes of all ranks."""
    out = folder / "result"
    with pytest.MonkeyPatch.context() as patch:
        notes = change_trials(patch, app)
        shown = call(app.search.main, *TINY, "--trials", 5, "--out", out)
    return shown, out, chainermn.create_communicator("naive").allgather_obj(notes)


@pytest.mark.each_mpi
@pytest.mark.mpi(3, timeout=LIMIT)
def test_all_ranks_train_the_same_trials_and_end_them_together(searched, expected):
    _, _, (notes, *others) = searched
    assert others == [notes, notes]
    assert list(values_of(notes)) == [f"trial_{n:03}" for n in range(5)]
    assert len({tuple(values) for values in values_of(notes).values()}) == 5
    expected[2][0] = float("inf")
    assert list(values_of(notes).values()) == expected
    # Each rank has 18 images: two iterations per epoch.
    assert [what for _, what in notes if isinstance(what, int)] == [4, 2, 2, 4, 4]


@pytest.mark.mpi(3, timeout=LIMIT)
def test_pruned_and_failed_trials_do_not_end_the_search(searched):
    shown, out, notes = searched
    table = read_table(out)
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
        found = [float(row[name]) for name in VALUES]
        assert found[1:] == values[1:]
        assert found[0] == values[0] or number == 2
    if chainermn.create_communicator("naive").rank > 0:
        assert shown == ""
        return
    lines = shown.splitlines()
    assert lines[1].split()[:3] == ["trial", "lr", "weight_decay"]
    assert [line.split()[0] for line in lines[2:7]] == list("01234")
    assert lines[-1].startswith("table, picture and study: ")


@pytest.mark.mpi(3, timeout=LIMIT)
def test_what_the_best_trial_leaves(searched, app):
    shown, folder, _ = searched
    table = read_table(folder)
    complete = {
        n: float(row["accuracy"]) for n, row in table.items() if row["state"] == "complete"
    }
    best = max(complete, key=complete.get)
    row = table[best]
    if chainermn.create_communicator("naive").rank == 0:
        assert f"the best: trial {best}, {complete[best]:.2%} of the validation images" in shown
        assert f"train.py --lr {float(row['lr']):.4g} --weight-decay" in shown
    out = folder / f"trial_{best:03}"
    assert json.loads((out / "best.json").read_text())["value"] == complete[best]
    arguments = app.predict.read_arguments(out / "best.npz")
    assert arguments["unit"] == int(row["unit"])
    network = app.model.ResNet(arguments["unit"], 10, 0)
    app.model.load_weights((out / "best.npz").read_bytes(), out / "best.npz", network)
    assert (folder / "trials.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.mpi(3, timeout=LIMIT)
def test_a_second_start_goes_on_with_the_study(searched, app, call, refused):
    _, out, _ = searched
    comm = chainermn.create_communicator("naive")
    before = read_table(out)
    comm.mpi_comm.Barrier()
    call(app.search.main, *TINY, "--trials", 4, "--out", out)  # there are more than that already
    assert comm.bcast_obj(comm.rank == 0 and read_table(out)) == before
    call(app.search.main, *TINY, "--trials", 6, "--out", out)
    after = comm.bcast_obj(comm.rank == 0 and read_table(out))
    assert list(after) == list(range(6))
    assert {n: after[n] for n in range(5)} == before
    shown = refused(app.search.main, *TINY[:-1], "8", "--out", out)
    assert "error: the study was begun with other settings (batchsize: 9, now 8)" in shown


# Runs the search. Rank 1 is killed in trial 1. Each rank records the values of its trials.
KILL = """
import json, os, runpy, signal, sys
from pathlib import Path
sys.path[0] = {here!r}
import data
import training

data.TEST_SHAPES = 10
create = training.create_trainer

def create_or_die(args, comm, device, images):
    with open(f"rank{{comm.rank}}", "a") as file:
        print(json.dumps([vars(args)[name] for name in {values}]), file=file)
    made = create(args, comm, device, images)
    if args.out.endswith("_001") and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

training.create_trainer = create_or_die
runpy.run_path(os.path.join(sys.path[0], "search.py"), run_name="__main__")
"""


@pytest.mark.each_mpi
def test_killed_search_that_is_started_again_tries_the_same(expected, tmp_path):
    script = tmp_path / "search.py"
    script.write_text(KILL.format(here=str(HERE), values=VALUES))
    command = ["-m", "chainermn", "launch", "-n", "2", "--max-restarts", "1"]
    shown = subprocess.run(
        [sys.executable, *command, script, *TINY, "--epoch", "1", "--trials", "3"],
        cwd=tmp_path,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 0, shown
    assert list(read_table(tmp_path / "result")) == [0, 2, 3]
    for rank in (0, 1):
        tried = [json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
        assert tried == [*expected[:2], *expected[1:3]]


@pytest.mark.mpi(4, timeout=LIMIT)
def test_groups_of_ranks_share_the_trials(
    app, call, call_quietly, expected, shared_tmp_path, monkeypatch
):
    out = shared_tmp_path / "result"
    comm = chainermn.create_communicator("naive")
    # Begin with one group; the study knows nothing of ranks.
    options = [*TINY, "--epoch", 1, "--out", out]
    call(app.search.main, *options, "--trials", 1)
    own = change_trials(monkeypatch, app)
    call_quietly(app.search.main, *options, "--trials", 5, "--ranks-per-trial", 2)
    notes = comm.allgather_obj(own)
    assert notes[0] == notes[1]
    assert notes[2] == notes[3]
    tried = [values_of(notes[rank]) for rank in (0, 2)]
    assert all(tried)  # neither group is idle
    assert sorted([*tried[0], *tried[1]]) == [f"trial_{n:03}" for n in range(1, 5)]
    together = {**tried[0], **tried[1]}
    expected[2][0] = float("inf")
    assert [together[name] for name in sorted(together)] == expected[1:]
    assert sorted(read_table(out)) == list(range(5))


@pytest.mark.mpi(3, timeout=LIMIT)
def test_ranks_that_cannot_be_divided_are_refused(app, refused, shared_tmp_path):
    options = ["--ranks-per-trial", 2, "--out", shared_tmp_path / "result"]
    shown = refused(app.search.main, *TINY, *options)
    assert shown == "error: --ranks-per-trial must divide the number of ranks, 3"


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
