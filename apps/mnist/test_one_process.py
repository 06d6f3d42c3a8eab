"""Training on any number of ranks computes what NumPy computes in one process."""

import json
import subprocess
import sys
from pathlib import Path

import chainer
import numpy as np
import pytest
from chainer.datasets import TupleDataset
from chainer.training import StandardUpdater

import chainermn
from chainermn.testing.mpiexec import direct_environment

HERE = Path(__file__).resolve().parent
ACCURACY, LOSS = "validation/main/accuracy", "validation/main/loss"
# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300

N_TRAIN, N_VALIDATION, N_PIXELS, N_UNITS, BATCHSIZE, EPOCHS = 61, 31, 12, 20, 5, 3
OPTIONS = ["--batchsize", str(BATCHSIZE), "--unit", str(N_UNITS), "--epoch", str(EPOCHS)]

Examples = tuple[np.ndarray, np.ndarray]


def draw(n: int) -> Examples:
    """Return images of noise in float64, and digits."""
    random = np.random.RandomState(n)
    return random.rand(n, N_PIXELS), random.randint(10, size=n).astype(np.int32)


@pytest.fixture
def few(app, monkeypatch) -> None:
    """Let the scripts train in float64 on few images."""
    parts = [TupleDataset(*draw(n)) for n in (N_TRAIN, N_VALIDATION)]
    monkeypatch.setattr(app.data, "load", lambda *_: parts)
    chainer.global_config.dtype = np.float64


class OneProcess:
    """The scripts' training with NumPy alone, on all batches of a step at once.

    ``n_replicas`` is None for a script that trains with plain Chainer's optimizer. Plain Chainer's
    evaluator takes the mean over batches, of the means of ``per_mean`` images.
    """

    def __init__(self, app, n_replicas: int | None, per_mean: int = N_VALIDATION) -> None:
        self.images, self.digits = draw(N_TRAIN)
        x, digits = draw(N_VALIDATION)
        begins = range(0, N_VALIDATION, per_mean)
        self.validation = [(x[i : i + per_mean], digits[i : i + per_mean]) for i in begins]
        self.parts = [np.arange(N_TRAIN)]
        if n_replicas is not None:  # as scatter_dataset divides them
            order = np.random.RandomState(0).permutation(N_TRAIN)
            length = -(-N_TRAIN // n_replicas)
            begins = [rank * N_TRAIN // n_replicas for rank in range(n_replicas)]
            self.parts = [order[begin : begin + length] for begin in begins]
        # The initial weights and the shuffling are those of train.py.
        np.random.seed(0)
        with chainer.using_config("dtype", np.float64):
            mlp = app.model.MLP(N_UNITS, 10)
            self.batches = chainer.iterators.SerialIterator(range(len(self.parts[0])), BATCHSIZE)
            mlp(self.images[:1])
        layers = [mlp.l1, mlp.l2, mlp.l3]
        self.weights = [array for layer in layers for array in (layer.W.array, layer.b.array)]
        self.first_moments = [np.zeros_like(array) for array in self.weights]
        self.second_moments = [np.zeros_like(array) for array in self.weights]
        self.n_steps = self.n_updates = 0
        # A multi-node optimizer's first update makes replicas equal and takes no step.
        self.n_updates_without_step = 0 if n_replicas is None else 1
        self.log, self.weights_after = [], []
        for epoch in range(1, EPOCHS + 1):
            self.train(epoch)

    def train(self, epoch: int) -> None:
        """Train to the end of an epoch, and note what the script logs."""
        judged = []
        while self.batches.epoch < epoch:
            batch = next(self.batches)
            chosen = [part[batch] for part in self.parts]
            judged.append(self.judge(self.images[chosen[0]], self.digits[chosen[0]]))
            self.n_updates += 1
            if self.n_updates > self.n_updates_without_step:
                everywhere = np.concatenate(chosen)
                self.step(self.images[everywhere], self.digits[everywhere])
        row = dict(zip(("main/loss", "main/accuracy"), np.mean(judged, axis=0), strict=True))
        judged = [self.judge(*part) for part in self.validation]
        row |= dict(zip((LOSS, ACCURACY), np.mean(judged, axis=0), strict=True))
        self.log.append({"epoch": epoch, "iteration": self.n_updates, **row})
        self.weights_after.append([array.copy() for array in self.weights])

    def scores(self, x: np.ndarray) -> list[np.ndarray]:
        """Return the input, and the output of every layer."""
        w1, b1, w2, b2, w3, b3 = self.weights
        h1 = np.maximum(x @ w1.T + b1, 0)
        h2 = np.maximum(h1 @ w2.T + b2, 0)
        return [x, h1, h2, h2 @ w3.T + b3]

    def judge(self, x: np.ndarray, digits: np.ndarray) -> tuple[float, float]:
        """Return the mean cross entropy, and the share of images that are read correctly."""
        y = self.scores(x)[-1]
        loss = np.log(np.exp(y).sum(axis=1)) - y[np.arange(len(x)), digits]
        return loss.mean(), np.mean(y.argmax(axis=1) == digits)

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

    @property
    def best(self) -> int:
        """Index of the epoch with the best network."""
        return int(np.argmax([row[ACCURACY] for row in self.log]))

    def assert_is_in(self, out: Path) -> None:
        for row, expected in zip(json.loads((out / "log").read_text()), self.log, strict=True):
            assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-12)
        found = json.loads((out / "best.json").read_text())
        best = self.log[self.best]
        assert found["epoch"] == best["epoch"]
        assert found["value"] == pytest.approx(best[ACCURACY], rel=1e-12)
        names = [f"l{n}/{kind}" for n in (1, 2, 3) for kind in ("W", "b")]
        for file, epoch in (("model.npz", -1), ("best.npz", self.best)):
            with np.load(out / file) as saved:
                assert len(saved) == 6
                for name, expected in zip(names, self.weights_after[epoch], strict=True):
                    assert saved[name].dtype == np.float64
                    np.testing.assert_allclose(
                        saved[name], expected, rtol=1e-12, atol=1e-12, err_msg=name
                    )


class Stopped(Exception):
    """Ends a training in the middle of an epoch."""


def train_twice(run, main, arguments: list[str], monkeypatch) -> None:
    """Stop a training in its second epoch, and start it again."""
    update = StandardUpdater.update

    def update_or_stop(self) -> None:
        update(self)
        if self.epoch_detail > 1.5:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(StandardUpdater, "update", update_or_stop)
        with pytest.raises(Stopped):
            main(arguments)
    run(main, *arguments)


@pytest.mark.mpi(1, timeout=LIMIT)
def test_train_single(app, few, tmp_path, capsys):
    expected, arguments = OneProcess(app, None, BATCHSIZE), [*OPTIONS, "--out", str(tmp_path)]
    app.train_single.main(arguments)
    expected.assert_is_in(tmp_path)
    capsys.readouterr()
    app.train_single.main([*arguments, "--evaluate"])
    best = expected.log[expected.best][ACCURACY]
    assert capsys.readouterr() == (f"{best:.2%} of the validation data read correctly\n", "")


@pytest.mark.mpi(1, 2, timeout=LIMIT)
def test_train(app, run, few, monkeypatch, shared_tmp_path, capsys, mpi_ranks):
    check(app, run, "train", mpi_ranks, monkeypatch, shared_tmp_path, capsys)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_train_model_parallel(app, run, few, monkeypatch, shared_tmp_path, capsys):
    check(app, run, "train_model_parallel", None, monkeypatch, shared_tmp_path, capsys)


@pytest.mark.mpi(2, 4, timeout=LIMIT)
def test_train_dual_parallel(app, run, few, monkeypatch, shared_tmp_path, capsys, mpi_ranks):
    check(app, run, "train_dual_parallel", mpi_ranks // 2, monkeypatch, shared_tmp_path, capsys)


def check(app, run, script, n_replicas, monkeypatch, folder, capsys) -> None:
    comm = chainermn.create_communicator()
    expected, out = OneProcess(app, n_replicas), folder / "result"
    arguments = [*OPTIONS, "--out", str(out)]
    train_twice(run, getattr(app, script).main, arguments, monkeypatch)
    expected.assert_is_in(out)
    printed = capsys.readouterr().out
    iterations = [row["iteration"] for row in expected.log]
    snapshot = out / f"snapshot_iter_{iterations[0]}.0"
    resuming = f"resuming after iteration {iterations[0]}, epoch 1, from {snapshot}\n"
    assert (resuming in printed) == (comm.rank == 0)

    files = {path.name for path in out.glob("[!.]*")}
    files -= {"accuracy.png", "loss.png", "examples.png", "log", "run.json"}
    files -= {"best.json", "best.npz", "model.npz"}
    owners = [0] if script == "train" else [0, 1]
    assert files == {f"snapshot_iter_{n}.{rank}" for n in iterations for rank in owners}

    # Each script reads the networks of the others.
    scripts = [app.train]
    scripts += [app.train_model_parallel] * (comm.size == 2)
    scripts += [app.train_dual_parallel] * (comm.size % 2 == 0)
    for other in scripts:
        other.main([*arguments, "--evaluate"])
        best = expected.log[expected.best][ACCURACY]
        lines = [f"{best:.2%} of the validation data read correctly"] * (comm.rank == 0)
        assert capsys.readouterr().out.splitlines()[1:] == lines


# Runs train.py in float64 on few data. The first time, rank 1 is killed in the middle of an epoch.
KILLED_ONCE = """
import os, runpy, signal, sys
from pathlib import Path
sys.path[0] = {here!r}
import chainer, data
import numpy as np
from chainer.datasets import TupleDataset
from chainer.training import StandardUpdater

chainer.global_config.dtype = np.float64
arrays = np.load("arrays.npz")
data.load = lambda *_: [TupleDataset(arrays[f"x{{n}}"], arrays[f"y{{n}}"]) for n in {sizes}]
update = StandardUpdater.update

def update_or_die(self):
    update(self)
    if self.iteration == 10 and self.get_optimizer("main").communicator.rank == 1:
        try:
            Path("killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

StandardUpdater.update = update_or_die
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.each_mpi
def test_killed_job_that_is_started_again_ends_as_one_left_alone(app, tmp_path):
    sizes = N_TRAIN, N_VALIDATION
    arrays = {
        f"{name}{n}": array for n in sizes for name, array in zip("xy", draw(n), strict=True)
    }
    np.savez(tmp_path / "arrays.npz", **arrays)
    program = KILLED_ONCE.format(here=str(HERE), script=str(HERE / "train.py"), sizes=sizes)
    (tmp_path / "train.py").write_text(program)
    command = ["-m", "chainermn", "launch", "-n", "2", "--max-restarts", "1", "train.py", *OPTIONS]
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
    expected = "resuming after iteration 7, epoch 1, from result/snapshot_iter_7.0"
    assert expected in shown.stdout.splitlines()
    OneProcess(app, 2).assert_is_in(tmp_path / "result")
