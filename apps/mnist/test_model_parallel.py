"""Train with the layers on several ranks, and compare with one process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import chainer
import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import numpy as np
import pytest

from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import JobResult, direct_environment, mpiexec_command, run_job

HERE = Path(__file__).resolve().parent
ACCURACY, LOSS = "validation/main/accuracy", "validation/main/loss"
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
# If other programs use the cores too, BLAS threads spend much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

N_TRAIN, N_VALIDATION, N_PIXELS, N_UNITS, BATCHSIZE = 61, 31, 12, 20, 5
OPTIONS = ["--batchsize", str(BATCHSIZE), "--unit", str(N_UNITS)]

# Runs a script of the app in float64 on few data. The first time, one rank is killed in the middle
# of the second epoch.
IN_FLOAT64 = """
import os, runpy, signal, sys
from pathlib import Path
sys.path[0] = {here!r}
import chainer, data
import numpy as np
from chainer.datasets import TupleDataset
from chainer.training import StandardUpdater

chainer.global_config.dtype = np.float64
arrays = np.load({arrays!r})
data.load = lambda *_: [TupleDataset(arrays[n + "_x"], arrays[n + "_y"]) for n in ("train", "val")]
update = StandardUpdater.update

def update_or_die(self):
    update(self)
    from mpi4py import MPI
    if self.iteration == 10 and MPI.COMM_WORLD.rank == {victim}:
        try:
            Path("killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

StandardUpdater.update = update_or_die
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> Path:
    random = np.random.RandomState(5)
    path = tmp_path_factory.mktemp("data") / "arrays.npz"
    found = {}
    for name, n in (("train", N_TRAIN), ("val", N_VALIDATION)):
        found[f"{name}_x"] = random.rand(n, N_PIXELS)
        found[f"{name}_y"] = random.randint(10, size=n).astype(np.int32)
    np.savez(path, **found)
    return path


def write_script(folder: Path, script: str, arrays: Path, victim: int = -1) -> Path:
    path = folder / script
    names = {"here": str(HERE), "script": str(HERE / script), "arrays": str(arrays)}
    path.write_text(IN_FLOAT64.format(**names, victim=victim))
    return path


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


def succeed(job: JobResult) -> JobResult:
    assert (job.returncode, job.stderr) == (0, ""), job
    assert not job.left_behind
    return job


def run_here(command: list, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=direct_environment() | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


class OneProcess:
    """The scripts' training with NumPy alone, on all batches of a step at once."""

    def __init__(self, arrays: Path, n_replicas: int | None) -> None:
        with np.load(arrays) as found:
            self.images, self.digits = found["train_x"], found["train_y"]
            self.validation = found["val_x"], found["val_y"]
        self.parts = [np.arange(N_TRAIN)]
        if n_replicas is not None:  # as scatter_dataset divides them
            order = np.random.RandomState(0).permutation(N_TRAIN)
            length = -(-N_TRAIN // n_replicas)
            begins = [rank * N_TRAIN // n_replicas for rank in range(n_replicas)]
            self.parts = [order[begin : begin + length] for begin in begins]
        # The initial weights and the shuffling are those of train.py.
        np.random.seed(0)
        with chainer.using_config("dtype", np.float64):
            mlp = import_modules(HERE, ["model"]).model.MLP(N_UNITS, 10)
            self.batches = chainer.iterators.SerialIterator(range(len(self.parts[0])), BATCHSIZE)
            mlp(self.images[:1])
        layers = [mlp.l1, mlp.l2, mlp.l3]
        self.weights = [array for layer in layers for array in (layer.W.array, layer.b.array)]
        self.first_moments = [np.zeros_like(array) for array in self.weights]
        self.second_moments = [np.zeros_like(array) for array in self.weights]
        self.n_steps = 0
        # A multi-node optimizer's first update makes replicas equal and takes no step.
        self.n_updates_without_step = 0 if n_replicas is None else 1

    def train(self, epochs: int) -> None:
        while self.batches.epoch < epochs:
            batch = next(self.batches)
            if self.n_updates_without_step:
                self.n_updates_without_step -= 1
                continue
            chosen = np.concatenate([part[batch] for part in self.parts])
            self.step(self.images[chosen], self.digits[chosen])

    def scores(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input, and the output of every layer."""
        w1, b1, w2, b2, w3, b3 = self.weights
        h1 = np.maximum(x @ w1.T + b1, 0)
        h2 = np.maximum(h1 @ w2.T + b2, 0)
        return [x, h1, h2, h2 @ w3.T + b3]

    def step(self, x: np.ndarray, digits: np.ndarray) -> None:
        """Take a step of Adam (Kingma and Ba, 2015) on the mean cross entropy."""
        *inputs, y = self.scores(x)
        softmax = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
        delta = (softmax - np.eye(10)[digits]) / len(x)
        gradients: list[np.ndarray] = []
        for h, w in zip(inputs[::-1], self.weights[4::-2], strict=True):
            gradients[:0] = [delta.T @ h, delta.sum(axis=0)]
            delta = (delta @ w) * (h > 0)
        self.n_steps += 1
        t, moments = self.n_steps, zip(self.first_moments, self.second_moments, strict=True)
        rate = 0.001 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for w, g, (m, v) in zip(self.weights, gradients, moments, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            w -= rate * m / (np.sqrt(v) + 1e-8)

    def assert_is_in(self, out: Path) -> None:
        with np.load(out / "model.npz") as saved:
            assert len(saved) == 6
            names = [f"l{n}/{kind}" for n in (1, 2, 3) for kind in ("W", "b")]
            for name, expected in zip(names, self.weights, strict=True):
                assert saved[name].dtype == np.float64
                np.testing.assert_allclose(
                    saved[name], expected, rtol=1e-12, atol=1e-12, err_msg=name
                )
        images, digits = self.validation
        y = self.scores(images)[-1]
        loss = np.mean(np.log(np.exp(y).sum(axis=1)) - y[np.arange(N_VALIDATION), digits])
        row = read_log(out)[-1]
        assert row["iteration"] == self.n_steps + (len(self.parts) > 1)
        assert row[LOSS] == pytest.approx(loss, rel=1e-12)
        assert row[ACCURACY] == pytest.approx(np.mean(y.argmax(axis=1) == digits), rel=1e-12)


@pytest.mark.each_mpi
def test_model_parallel_training_is_that_of_one_process(arrays, tmp_path):
    script = write_script(tmp_path, "train_model_parallel.py", arrays)
    arguments = [script, *OPTIONS, "--out"]
    job = succeed(run_job(2, [*arguments, "whole", "--epoch", "3", "--quiet"], cwd=tmp_path))
    assert job.stdout == ""
    expected = OneProcess(arrays, None)
    expected.train(3)
    expected.assert_is_in(tmp_path / "whole")

    succeed(run_job(2, [*arguments, "parts", "--epoch", "1"], cwd=tmp_path))
    job = succeed(run_job(2, [*arguments, "parts", "--epoch", "3"], cwd=tmp_path))
    assert "resuming after iteration 13, epoch 1, from parts/snapshot_iter_13.0" in job.stdout
    for name in ("model.npz", "best.npz"):
        with np.load(tmp_path / "whole" / name) as one, np.load(tmp_path / "parts" / name) as two:
            for key in one:
                np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def test_dual_parallel_training_is_that_of_one_process_also_after_a_kill(arrays, tmp_path):
    script = write_script(tmp_path, "train_dual_parallel.py", arrays, victim=3)
    command = [sys.executable, "-m", "chainermn", "launch", "-n", "4", "--max-restarts", "1"]
    shown = run_here([*command, script, *OPTIONS, "--epoch", "3", "--out", "result"], tmp_path)
    assert shown.returncode == 0, shown
    assert (tmp_path / "killed").exists()
    assert "resuming after iteration 7, epoch 1, from result/snapshot_iter_7.0" in shown.stdout
    expected = OneProcess(arrays, 2)
    expected.train(3)
    expected.assert_is_in(tmp_path / "result")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Train on the default data, running the scripts as programs."""
    folder = tmp_path_factory.mktemp("digits")
    scripts = {"train_model_parallel.py": "parallel", "train_single.py": "single"}
    for script, out in scripts.items():
        program = [HERE / script, "--epoch", "2", "--out", out]
        command = program if out == "single" else mpiexec_command(2, program, python=False)
        shown = run_here(command, folder, **(ONE_THREAD if out == "single" else {}))
        assert (shown.returncode, shown.stderr) == (0, ""), shown
    return folder


def test_log_and_files_are_those_of_one_process(digits):
    for row, single in zip(*(read_log(digits / o) for o in ("parallel", "single")), strict=True):
        for key in ("iteration", "main/loss", "main/accuracy", LOSS, ACCURACY):
            assert row[key] == pytest.approx(single[key], rel=1e-4), key
    files = {
        out: {path.name for path in (digits / out).iterdir()} for out in ("parallel", "single")
    }
    snapshots = {f"snapshot_iter_{n}.{rank}" for n in (48, 96) for rank in (0, 1)}
    assert files["parallel"] - files["single"] == {"run.json", *snapshots}
    assert files["single"] - files["parallel"] == {"snapshot_iter_48", "snapshot_iter_96"}


def test_network_is_evaluated_by_other_scripts(digits):
    best = json.loads((digits / "parallel/best.json").read_text())["value"]
    options = ["--evaluate", "--out", "parallel"]
    in_one = run_here([sys.executable, HERE / "train.py", *options], digits, **ONE_THREAD)
    job = succeed(run_job(2, [HERE / "train_dual_parallel.py", *options], cwd=digits))
    for text in (in_one.stdout, job.stdout):
        assert text.splitlines()[1:] == [f"{best:.2%} of the validation data read correctly"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("train_model_parallel.py", "the network takes 2 ranks: start 2, not 3"),
        ("train_dual_parallel.py", "each replica takes 2 ranks: start an even number, not 3"),
    ],
)
def test_number_of_ranks_that_does_not_fit_ends_all_with_one_line(script, message, tmp_path):
    job = run_job(3, [HERE / script, "--quiet"], cwd=tmp_path)
    assert job.returncode != 0
    assert not job.timed_out
    assert job.stdout == ""
    # Open MPI adds lines of its own.
    assert re.findall("error: .*|Traceback", job.stderr) == [f"error: {message}"]
