"""Train on a few ranks and check what comes out."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda

from chainermn.testing.in_turn import run_in_turn
from chainermn.testing.mpiexec import direct_environment, mpiexec_command
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
ACCURACY = "validation/main/accuracy"
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
SMALL = ["--examples", "1500", "--unit", "8", "--epoch", "8", "--batchsize", "15"]
TINY = ["--examples", "60", "--unit", "4", "--epoch", "3", "--batchsize", "9"]


@pytest.fixture(scope="module")
def two_ranks(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    return start(2, "train.py", *SMALL, cwd=folder), folder / "result"


@pytest.mark.each_mpi
def test_two_ranks_learn_to_recognize_shapes(two_ranks, read_log):
    _, out = two_ranks
    log = read_log(out)
    assert [row["epoch"] for row in log] == list(range(1, 9))
    assert log[-1][ACCURACY] > 0.3


@pytest.mark.skipif(
    "CHAINERMN_LONG_TESTS" not in os.environ,
    reason="CHAINERMN_LONG_TESTS is not set: fewer images show as much, but not what README says",
)
def test_the_command_of_readme(start, tmp_path):
    job = start(2, "train.py", cwd=tmp_path)
    assert float(re.search(r"([\d.]+)% of the 1000 test images", job.stdout)[1]) > 95


def test_what_is_written(two_ranks, read_log):
    _, out = two_ranks
    plots = ["accuracy.png", "loss.png", "ranks.png"]
    snapshots = [f"snapshot_iter_{45 * epoch}.0" for epoch in (6, 7, 8)]
    others = ["best.json", "best.npz", "log", "model.npz", "run.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*others, *plots, *snapshots])
    for name in plots:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert all(row["images/s"] > 0 for row in read_log(out))


def test_learning_rate_rises_and_falls(two_ranks, read_log):
    _, out = two_ranks
    peak = 0.4 * 15 * 2 / 100
    done = [(epoch - 1 / 45) / 8 for epoch in range(1, 9)]  # before the last step of an epoch
    falling = [(1 + np.cos(np.pi * (share - 0.2) / 0.8)) / 2 for share in done[1:]]
    expected = peak * np.array([0.1 + 0.9 * done[0] / 0.2, *falling])
    np.testing.assert_allclose([row["lr"] for row in read_log(out)], expected, rtol=1e-9)


def test_test_images_are_those_of_the_best_network(two_ranks, app, tmp_path):
    job, out = two_ranks
    first, *_, best, _, tested = job.stdout.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    about = json.loads((out / "best.json").read_text())
    assert best == f"the best: {about['value']:.2%} after epoch {about['epoch']}"
    accuracy = re.fullmatch(r"([\d.]+)% of the 1000 test images recognized by the best", tested)[1]

    command = [HERE / "predict.py", out / "best.npz", "--picture", tmp_path / "seen.png"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert (shown.returncode, shown.stderr) == (0, ""), shown
    assert shown.stdout.startswith(f"{accuracy}% of 1000 test images recognized\n")
    pairs = re.findall(r"^  (\w+) taken for (\w+): \d+ times?$", shown.stdout, re.MULTILINE)
    assert {name for pair in pairs for name in pair} <= set(app.shapes.CLASSES)
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_predicting_says_what_is_missing(tmp_path, monkeypatch, capsys, app):
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path / "best.npz")])
    assert app.predict.main() == 1
    assert "run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{")
    assert app.predict.main() == 1
    assert "run.json: not JSON" in capsys.readouterr().err
    right = {"dataset": "shapes", "data": None, "examples": None, "unit": 8, "dropout": 0.1}
    for change, message in [
        ({"unit": 10**12}, "'unit': expected an integer from 1 to 1024, got 1000000000000"),
        ({"dataset": 5}, "'dataset': expected one of cifar10, cifar100, shapes, got 5"),
        ({"data": []}, "'data': expected a string or null, got []"),
        ({"examples": 10**12}, "expected at most 1000000 examples, got more"),
        ({"dropout": "x"}, "'dropout': expected a finite number, got 'x'"),
    ]:
        (tmp_path / "run.json").write_text(json.dumps({"arguments": right | change}))
        assert app.predict.main() == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {tmp_path}/run.json")
        assert line.endswith(message)


def test_evaluation_on_ranks_that_do_not_divide_the_images(two_ranks, start):
    job, out = two_ranks
    again = start(3, "train.py", *SMALL, "--evaluate", cwd=out.parent)
    assert again.stdout.splitlines()[-1] == job.stdout.splitlines()[-1]


def test_weights_of_another_network_are_refused(two_ranks, app):
    path = two_ranks[1] / "best.npz"
    with pytest.raises(ValueError, match=r"best.npz has the weights of another network"):
        app.model.load_weights(path.read_bytes(), path, app.model.ResNet(4, 10, 0))
    with pytest.raises(OSError, match=r"best.npz is damaged"):
        app.model.load_weights(path.read_bytes()[:-500], path, app.model.ResNet(8, 10, 0))


def test_weights_of_strangers_run_nothing(two_ranks, app, tmp_path, monkeypatch, capsys):
    set_traps(two_ranks[1] / "best.npz", tmp_path / "best.npz", tmp_path / "trapped")
    shutil.copy(two_ranks[1] / "run.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["predict.py", str(tmp_path / "best.npz")])
    assert app.predict.main() == 1
    assert re.match(r"error: .* in .*best\.npz is a pickle of more than", capsys.readouterr().err)
    assert not (tmp_path / "trapped").exists()


def test_input_that_is_wrong_ends_the_job_with_one_line(two_ranks, tmp_path):
    snapshot, best = next(two_ranks[1].glob("snapshot_*.0")), two_ranks[1] / "best.npz"
    (tmp_path / "strange").mkdir()
    set_traps(snapshot, tmp_path / "snapshot.0", tmp_path / "trapped")
    set_traps(best, tmp_path / "strange/best.npz", tmp_path / "trapped")
    cases = [
        (["--dataset", "cifar10", "--data", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--dataset", "cifar10", "--data", "pipe"], "pipe: expected a regular file, got a pipe"),
        (["--evaluate"], "No such file or directory: 'result/best.npz'"),
        (["--evaluate", "--out", "strange"], "in strange/best.npz is a pickle of more than None"),
        (["--resume", "snapshot.0"], "in snapshot.0 is a pickle of more than None, numbers and"),
    ]
    os.mkfifo(tmp_path / "pipe")
    runs = [[*TINY, *options] for options, _ in cases]
    jobs = run_in_turn(2, HERE / "train.py", runs, cwd=tmp_path)
    assert not (tmp_path / "trapped").exists()
    for (_, message), job in zip(cases, jobs, strict=True):
        assert job.returncode != 0, job
        (line,) = (line for line in job.stderr.splitlines() if line.startswith("error: "))
        assert message in line
        assert "Traceback" not in job.stderr


def test_numbers_that_make_no_sense_are_refused(app, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    app.training.add_arguments(parser, epoch=1)
    monkeypatch.setattr(sys, "argv", ["train.py", "--batchsize", "0"])
    with pytest.raises(SystemExit):
        app.training.checked(parser)
    assert "--batchsize must be at least 1, got 0" in capsys.readouterr().err


# Runs the app; the first time, rank 1 is killed in the middle of the second epoch.
WITH_KILL = """
import os, runpy, signal, sys
from pathlib import Path
from chainer.training import StandardUpdater
update = StandardUpdater.update

def update_or_die(self):
    update(self)
    if self.iteration == 5 and self.get_optimizer("main").communicator.rank == 1:
        try:
            Path("killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

StandardUpdater.update = update_or_die
sys.path[0] = {here!r}
runpy.run_path(os.path.join(sys.path[0], "train.py"), run_name="__main__")
"""


@pytest.mark.each_mpi
def test_killed_job_that_is_started_again_ends_as_one_left_alone(start, read_log, tmp_path):
    (tmp_path / "whole").mkdir()
    job = start(2, "train.py", *TINY, "--quiet", cwd=tmp_path / "whole")
    assert job.stdout == ""
    (tmp_path / "train.py").write_text(WITH_KILL.format(here=str(HERE)))
    command = ["-m", "chainermn", "launch", "-n", "2", "--max-restarts", "1", "train.py", *TINY]
    shown = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 0, shown
    assert (tmp_path / "killed").exists()
    assert "resuming after iteration 3, epoch 1, from result/snapshot_iter_3.0" in shown.stdout
    result, whole = tmp_path / "result", tmp_path / "whole/result"
    for name in ("model.npz", "best.npz"):
        with np.load(result / name) as first, np.load(whole / name) as second:
            assert sorted(first) == sorted(second)
            for key in first:
                np.testing.assert_array_equal(first[key], second[key], err_msg=key)
    for row, straight in zip(read_log(result), read_log(whole), strict=True):
        for key in ("iteration", "main/loss", ACCURACY, "lr"):
            assert row[key] == straight[key]


# Takes one step with different images on each rank, and saves the inputs and the results.
ONE_STEP = """
import argparse, sys
import chainer, numpy as np
sys.path[0] = {here!r}
import chainermn, data, training

chainer.global_config.dtype = np.float64
parser = argparse.ArgumentParser()
training.add_arguments(parser, epoch=1)
args = parser.parse_args(["--batchsize", "4", "--seed", "3"])
args.unit, args.dropout, args.lr, args.weight_decay = 4, 0, 0.1, 0.01
comm, device = training.start(args)
trainer, network = training.create_trainer(args, comm, device, data.load("shapes", examples=50))
batches, optimizer = trainer.updater.get_iterator("main"), trainer.updater.get_optimizer("main")
model = optimizer.target
batch = chainer.dataset.concat_examples(batches.next())
optimizer.update(model, *batch)  # makes the parameters of all ranks equal
before = {{name: parameter.array.copy() for name, parameter in network.namedparams()}}
optimizer.update(model, *batch)
np.savez(f"rank{{comm.rank}}.npz", x=batch[0], t=batch[1],
         **{{f"before{{name}}": array for name, array in before.items()}},
         **{{f"gradient{{name}}": p.grad for name, p in network.namedparams()}},
         mean=network.block2.norm1.avg_mean)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_the_gradients_of_one_process_with_all_images(ranks, app, start, tmp_path):
    script = tmp_path / "one_step.py"
    script.write_text(ONE_STEP.format(here=str(HERE)))
    start(ranks, script, cwd=tmp_path)
    found = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(ranks)]
    x, t = (np.concatenate([each[key] for each in found]) for key in ("x", "t"))
    assert len({image.tobytes() for image in x}) == 4 * ranks
    with chainer.using_config("dtype", np.float64):
        network = app.model.ResNet(4, 10, 0)
        for name, parameter in network.namedparams():
            parameter.copydata(chainer.Parameter(found[0][f"before{name}"]))
        for _ in range(2):  # twice: the running means cover both updates
            network.cleargrads()
            F.softmax_cross_entropy(network(x), t).backward()
    for name, parameter in network.namedparams():
        decay = 0.01 * parameter.array if name.endswith("/W") else 0
        for each in found:
            np.testing.assert_allclose(
                each[f"gradient{name}"], parameter.grad + decay, rtol=1e-8, atol=1e-12
            )
    for each in found:
        np.testing.assert_allclose(each["mean"], network.block2.norm1.avg_mean, rtol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", ["0", "1"], ids=["", "cuDNN"])
def test_learns_on_a_gpu(cudnn, start, read_log, tmp_path, monkeypatch):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    monkeypatch.setenv("CHAINER_COMPAT_CUDNN", cudnn)
    start(1, "train.py", *SMALL, "--gpu", cwd=tmp_path)
    assert read_log(tmp_path / "result")[-1][ACCURACY] > 0.3


def test_mpiexec_starts_the_script_itself(tmp_path):
    program = [HERE / "train.py", *TINY]
    shown = subprocess.run(
        mpiexec_command(2, program, python=False),
        cwd=tmp_path,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (shown.returncode, shown.stderr) == (0, ""), shown
