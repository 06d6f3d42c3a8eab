"""Train on a few ranks and check what comes out."""

import contextlib
import difflib
import functools
import gzip
import hashlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import chainer
import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.dataset import get_dataset_root, set_dataset_root
from sklearn.datasets import load_digits

from chainermn.testing.in_turn import run_in_turn
from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import JobResult, direct_environment, mpiexec_command, run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
ACCURACY = "validation/main/accuracy"
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600


data = import_modules(HERE, ["data"]).data


@pytest.fixture
def predict() -> ModuleType:
    return import_modules(HERE, ["predict"]).predict


# If other programs use the cores too, BLAS threads spend much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def train(ranks: int, out: Path, *options: str | Path, warns: bool = False) -> JobResult:
    env = ONE_THREAD if ranks == 1 else {}  # with more ranks, the library divides the cores
    command = [HERE / "train.py", "--out", out, *options]
    return run_job(ranks, command, cwd=out.parent, env=env).check(warns=warns)


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


# Training


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[JobResult, Path]:
    out = tmp_path_factory.mktemp("two_ranks") / "result"
    return train(2, out, "--epoch", "6"), out


@pytest.mark.each_mpi
def test_two_ranks_learn_to_read_digits(two_ranks):
    _, out = two_ranks
    log = read_log(out)
    assert [row["epoch"] for row in log] == list(range(1, 7))
    assert log[-1][ACCURACY] > 0.93


@pytest.mark.skipif(
    "CHAINERMN_LONG_TESTS" not in os.environ,
    reason="CHAINERMN_LONG_TESTS is not set: six epochs show as much, but not what README says",
)
def test_as_many_epochs_as_by_default(tmp_path):
    job = train(2, tmp_path / "result")
    assert float(re.search(r"([\d.]+)% of the validation data", job.stdout)[1]) > 97


PNG = b"\x89PNG\r\n\x1a\n"
ITERATIONS = math.ceil(719 / 30)  # per epoch, on two ranks


def test_what_is_written(two_ranks):
    _, out = two_ranks
    plots = ["accuracy.png", "loss.png"]
    snapshots = [f"snapshot_iter_{n}.0" for n in (96, 120, 144)]
    others = ["best.json", "best.npz", "log", "model.npz", "run.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*others, *plots, *snapshots])
    for name in plots:
        assert (out / name).read_bytes().startswith(PNG)
    record = json.loads((out / "run.json").read_text())
    assert record["ranks"] == 2
    assert record["arguments"]["epoch"] == 6
    assert all(row["images/s"] > 0 for row in read_log(out))


def test_best_network_of_all_epochs(two_ranks, predict):
    _, out = two_ranks
    best = json.loads((out / "best.json").read_text())
    accuracies = [row[ACCURACY] for row in read_log(out)]
    assert best["value"] == pytest.approx(max(accuracies), abs=1e-12)
    assert best["epoch"] == 1 + accuracies.index(max(accuracies))
    # Means of a batch are float32.
    for name, value in (("best.npz", best["value"]), ("model.npz", accuracies[-1])):
        accuracy = accuracy_in_one_process(predict, out / name, "digits")
        assert accuracy == pytest.approx(value, abs=1e-6)


def accuracy_in_one_process(
    predict: ModuleType, weights: Path, dataset: str, directory: Path | None = None
) -> float:
    network = predict.MODELS["mlp"](200, 10)
    predict.load_weights(weights, network)
    _, validation = data.load(dataset, directory)
    images, digits = zip(*validation, strict=True)
    read = predict.predict(network, np.stack(images), batchsize=7).argmax(axis=1)
    return float(np.mean(read == np.array(digits)))


@pytest.mark.each_mpi
def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    job, out = two_ranks
    first, header, *rows, summary, best, files = job.stdout.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert header.split()[:2] == ["epoch", "main/loss"]
    assert [row.split()[0] for row in rows] == [str(epoch) for epoch in range(1, 7)]
    assert re.fullmatch(r"9\d\.\d\d% of the validation data .* after 6 epochs", summary)
    assert re.fullmatch(r"the best: 9\d\.\d\d% after epoch \d", best)
    names = "accuracy.png,loss.png,log,best.npz,model.npz"
    assert files == f"curves, log and networks: {out}/{{{names}}}"
    assert "\033" not in job.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(ranks, tmp_path):
    options = ["--epoch", "2", "--batchsize", "20", "--unit", "50", "--quiet"]
    assert train(ranks, tmp_path / "result", *options).stdout == ""
    log = read_log(tmp_path / "result")
    part = math.ceil(1437 / ranks)
    assert [row["iteration"] for row in log] == [math.ceil(n * part / 20) for n in (1, 2)]
    assert log[-1][ACCURACY] > 0.5


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    options = ["--gpu", "--epoch", "6"]
    out = tmp_path / "result"
    job = run_job(1, [HERE / "train.py", *options, "--out", out], cwd=tmp_path)
    assert job.returncode == 0, job
    assert read_log(out)[-1][ACCURACY] > 0.93


def test_says_what_a_gpu_is_missing_for(tmp_path):
    if cuda.available:
        pytest.skip("there is a GPU")
    job = run_job(2, [HERE / "train.py", "--gpu"], cwd=tmp_path)
    assert job.returncode != 0
    assert re.search(r"error: .*no GPU can be used on \S+: CuPy is not installed", job.stderr), job


def test_single_process_script_does_as_well(tmp_path):
    env = direct_environment() | ONE_THREAD
    accuracy = {}
    for script in ("train_single.py", "train.py"):
        out = tmp_path / script
        command = [HERE / script, "--epoch", "6", "--out", out, "--quiet"]
        shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", ""), shown
        accuracy[script] = read_log(out)[-1][ACCURACY]
    assert accuracy["train.py"] == pytest.approx(accuracy["train_single.py"], abs=0.02)
    assert accuracy["train.py"] > 0.93


@pytest.mark.parametrize("cwd", [HERE.parents[1], HERE.parent])
def test_mpiexec_starts_the_script_itself(cwd, tmp_path):
    script = HERE.relative_to(cwd) / "train.py"
    program = [script, "--epoch", "1", "--out", tmp_path / "result"]
    command = mpiexec_command(2, program, python=False)
    shown = subprocess.run(
        command,
        cwd=cwd,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (shown.returncode, shown.stderr) == (0, ""), shown
    assert read_log(tmp_path / "result")[-1]["iteration"] == ITERATIONS


def assert_equal_networks(one: Path, other: Path) -> None:
    with np.load(one) as first, np.load(other) as second:
        assert sorted(first) == sorted(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# Runs the app; the first time, rank 1 is killed in the middle of an epoch.
WITH_KILL = """
import os, runpy, signal, sys
from pathlib import Path
from chainer.training import StandardUpdater
update = StandardUpdater.update

def update_or_die(self):
    update(self)
    if self.iteration == 61 and self.get_optimizer("main").communicator.rank == 1:
        try:
            Path("killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

StandardUpdater.update = update_or_die
sys.path[0] = {here!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.each_mpi
def test_killed_job_that_is_started_again_ends_as_one_left_alone(two_ranks, tmp_path):
    _, whole = two_ranks
    (tmp_path / "train.py").write_text(
        WITH_KILL.format(here=str(HERE), script=str(HERE / "train.py"))
    )
    command = ["-m", "chainermn", "launch", "-n", "2", "--max-restarts", "1"]
    command += ["train.py", "--epoch", "6"]
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
    expected = "resuming after iteration 48, epoch 2, from result/snapshot_iter_48.0"
    assert expected in shown.stdout.splitlines()
    result = tmp_path / "result"
    for name in ("model.npz", "best.npz"):
        assert_equal_networks(result / name, whole / name)
    for row, straight in zip(read_log(result), read_log(whole), strict=True):
        for key in ("iteration", "main/loss", ACCURACY):
            assert row[key] == straight[key]


def test_finished_run_is_extended_with_more_epochs(two_ranks, tmp_path):
    _, whole = two_ranks
    out = tmp_path / "result"
    train(2, out, "--epoch", "2")
    for epochs in ("1", "2"):
        again = train(2, out, "--epoch", epochs, "--quiet", warns=True)
        assert "Training has ended there, after 2 epochs: ask for more" in again.stderr
        assert again.stdout == ""
        assert [row["epoch"] for row in read_log(out)] == [1, 2]
    train(2, out, "--epoch", "6")
    assert_equal_networks(out / "model.npz", whole / "model.npz")
    # From a snapshot of another folder, and with another number of ranks.
    job = train(3, tmp_path / "third", "--epoch", "7", "--resume", out / "snapshot_iter_144.0")
    assert "resuming after iteration 144, epoch 6, from " in job.stdout
    assert read_log(tmp_path / "third")[-1]["epoch"] == 7
    assert json.loads((tmp_path / "third/best.json").read_text())["epoch"] == 7


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_is_exact_where_ranks_do_not_divide_the_data(ranks, predict, tmp_path):
    files = write_mnist(tmp_path / "mnist", gzipped=False, test=31)
    # Some digits are read wrong and some right, as after a few steps of training.
    np.random.seed(4)
    network = predict.MODELS["mlp"](200, 10)
    network(np.zeros((1, 784), np.float32))
    chainer.serializers.save_npz(tmp_path / "best.npz", network)
    expected = accuracy_in_one_process(predict, tmp_path / "best.npz", "mnist", files)
    assert 0 < expected < 1
    options = ["--dataset", "mnist", "--data", files, "--batchsize", "4", "--evaluate"]
    job = train(ranks, tmp_path, *options)
    assert job.stdout.splitlines()[1] == f"{expected:.2%} of the validation data read correctly"
    assert not (tmp_path / "log").exists()


def test_convolutional_network_learns(tmp_path):
    train(2, tmp_path / "result", "--model", "cnn", "--epoch", "3", "--tensorboard")
    assert read_log(tmp_path / "result")[-1][ACCURACY] > 0.85
    (events,) = (tmp_path / "result/tensorboard").iterdir()
    assert ACCURACY.encode() in events.read_bytes()


def test_input_that_is_wrong_ends_all_ranks_with_one_line(two_ranks, tmp_path):
    cases = [
        (
            ["--evaluate", "--model", "cnn"],
            "weights of another network: --model, --unit and the number of classes must",
        ),
        (["--evaluate", "--out", "absent"], "No such file or directory: 'absent/best.npz'"),
        (["--resume", "absent"], "No such file or directory: 'absent'"),
        (["--resume", "snapshot.0"], "in snapshot.0 is a pickle of more than None, numbers and"),
        (["--evaluate", "--out", "strange"], "in strange/best.npz is a pickle of more than None"),
        (["--unit", "20"], "was written with other settings (unit: 200, now 20). Use the same"),
        (["--out", "file/result"], "file/result"),
        (["--quiet", "--data", "."], "only --dataset mnist is read from a folder"),
        (["--dataset", "mnist", "--data", "bomb"], "t10k-labels-idx1-ubyte.gz: expected 38 bytes"),
        (["--dataset", "mnist", "--data", "."], "contains neither train-images-idx3-ubyte nor"),
    ]
    (tmp_path / "result").symlink_to(two_ranks[1])
    (tmp_path / "file").touch()
    (tmp_path / "strange").mkdir()
    snapshot, best = next(two_ranks[1].glob("snapshot_*.0")), two_ranks[1] / "best.npz"
    set_traps(snapshot, tmp_path / "snapshot.0", tmp_path / "trapped")
    set_traps(best, tmp_path / "strange/best.npz", tmp_path / "trapped")
    write_mnist(tmp_path / "bomb", gzipped=True)
    path = tmp_path / "bomb/t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(1 << 20)))
    runs = [["--epoch", "7", *options] for options, _ in cases]
    jobs = run_in_turn(2, HERE / "train.py", runs, cwd=tmp_path)
    assert not (tmp_path / "trapped").exists()
    for (_, message), job in zip(cases, jobs, strict=True):
        assert job.returncode != 0, job
        assert job.stderr.count("error: ") == 1, job
        assert message in job.stderr
        assert "Traceback" not in job.stderr


def test_predictions_wrong_ones_first(two_ranks, predict, monkeypatch, tmp_path, capsys):
    _, out = two_ranks
    drawn = {}
    draw = predict.draw

    def look(images, digits, read, path):
        drawn.update(digits=digits, read=read)
        draw(images, digits, read, path)

    monkeypatch.setattr(predict, "draw", look)
    picture = tmp_path / "read.png"
    command = ["predict.py", str(out / "best.npz"), "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", command)
    assert predict.main() == 0
    accuracy = json.loads((out / "best.json").read_text())["value"]
    shown = capsys.readouterr().out
    assert shown.startswith(f"{accuracy:.2%} of 360 images read correctly\n")
    n_wrong = round(360 * (1 - accuracy))
    wrong = drawn["digits"] != drawn["read"]
    assert wrong.tolist() == [True] * n_wrong + [False] * (36 - n_wrong)
    assert picture.read_bytes().startswith(PNG)

    monkeypatch.setattr(sys, "argv", [*command, "--model", "cnn"])
    assert predict.main() == 1
    assert "has the weights of another network" in capsys.readouterr().err

    strange = tmp_path / "strange.npz"
    set_traps(out / "best.npz", strange, tmp_path / "trapped")
    monkeypatch.setattr(sys, "argv", ["predict.py", str(strange)])
    assert predict.main() == 1
    assert re.match(r"error: .* in .*strange\.npz is a pickle of more", capsys.readouterr().err)
    assert not (tmp_path / "trapped").exists()


def stop(process: subprocess.Popen) -> None:
    """Kill the leader of a session, and everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.each_mpi
def test_live_view_where_mpiexec_writes_to_a_terminal(tmp_path):
    terminal, end_of_mpiexec = os.openpty()
    command = mpiexec_command(2, [HERE / "train.py", "--epoch", "1", "--out", tmp_path])
    mpiexec = subprocess.Popen(
        command,
        env=direct_environment() | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=end_of_mpiexec,
        start_new_session=True,
    )
    os.close(end_of_mpiexec)
    shown, deadline = b"", time.monotonic() + LIMIT
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                try:
                    shown += os.read(terminal, 4096)
                except OSError:  # the other end has been closed
                    break
        assert mpiexec.wait(timeout=LIMIT) == 0
    finally:
        stop(mpiexec)
        os.close(terminal)
    assert b"iteration 1 " in shown
    assert b" images/s " in shown
    assert shown.count(b"after 1 epoch\r\n") == 1


# Data


def test_digits_are_split_always_alike():
    parts, again = data.load("digits"), data.load("digits")
    assert [len(part) for part in parts] == [1437, 360]
    for part, same in zip(parts, again, strict=True):
        images, labels = part[:], [label for _, label in part[:]]
        pixels = np.stack([image for image, _ in images])
        assert (pixels.shape[1], pixels.dtype, labels[0].dtype) == (64, np.float32, np.int32)
        assert (pixels.min(), pixels.max()) == (0, 1)
        assert set(labels) == set(range(10))
        assert labels == [label for _, label in same[:]]


def test_digits_are_those_of_scikit_learn():
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(1797)
    parts = data.load("digits")
    images, digits = zip(*(example for part in parts for example in part), strict=True)
    np.testing.assert_array_equal(np.stack(images), pixels[order] / 16)
    assert list(digits) == labels[order].tolist()


def idx(array: np.ndarray) -> bytes:
    shape = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def write_mnist(directory: Path, *, gzipped: bool, train: int = 90, test: int = 30) -> Path:
    """Make files like MNIST's: picture ``i`` shows the digit ``i % 10`` as a bright row."""
    directory.mkdir(exist_ok=True)
    for part, n in (("train", train), ("test", test)):
        labels = np.arange(n) % 10
        images = np.zeros((n, 28, 28))
        images[np.arange(n), labels] = 255
        for name, array in zip(data.IDX_FILES[part], (images, labels), strict=True):
            if gzipped:
                (directory / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (directory / name).write_bytes(idx(array))
    return directory


def assert_is_what_was_written(parts: tuple) -> None:
    assert [len(part) for part in parts] == [90, 30]
    image, label = parts[0][13]
    assert (image.shape, image.dtype, label, label.dtype) == ((784,), np.float32, 3, np.int32)
    np.testing.assert_array_equal(image.reshape(28, 28).argmax(axis=0), 3)
    assert (image.min(), image.max()) == (0, 1)


@pytest.mark.parametrize("gzipped", [False, True])
def test_mnist_from_idx_files(gzipped, tmp_path):
    assert_is_what_was_written(data.load("mnist", write_mnist(tmp_path, gzipped=gzipped)))


def test_training_on_mnist_files(tmp_path):
    files = write_mnist(tmp_path / "mnist", gzipped=True)
    options = ["--dataset", "mnist", "--data", files, "--batchsize", "5", "--epoch", "2"]
    train(2, tmp_path / "result", *options)
    assert read_log(tmp_path / "result")[-1][ACCURACY] > 0.9


VALID = idx(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "labels: expected an IDX file .* got nothing"),
        (b"<html>", "expected an IDX file that starts with 00 00 08 02 .* got 3c 68 74 6d"),
        (idx(np.zeros(6)), "got 00 00 08 01"),
        (VALID[:-1], r"expected 18 bytes for an array of shape \(2, 3\), got 17"),
        (VALID + b"\0", r"expected 18 bytes for an array of shape \(2, 3\), got at least 19"),
        (VALID[:8], "expected 12 bytes"),
        (VALID[:4] + b"\x7f" * 8, r"expected \d{19} bytes .*, got 12"),
        (gzip.compress(VALID, mtime=0)[:-4], "labels: damaged gzip file"),
        (gzip.compress(VALID, mtime=0)[:12] + b"?" * 20, "labels: expected an IDX file"),
    ],
)
def test_error_for_what_is_not_an_idx_file(content, message):
    with pytest.raises(ValueError, match=message):
        data.read_idx(content, 2, "labels")


READ_IDX = """
import gzip, pathlib, resource, sys
sys.path.insert(0, sys.argv[1])
import data

content = pathlib.Path(sys.argv[2]).read_bytes()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    data.read_idx(content, 2, "labels")
except ValueError as error:
    print(error)
"""


def test_idx_file_that_unpacks_to_gigabytes(tmp_path):
    parts = [gzip.compress(VALID), *[gzip.compress(bytes(1 << 24))] * 64]
    (tmp_path / "bomb").write_bytes(b"".join(parts))
    command = [sys.executable, "-c", READ_IDX, HERE, tmp_path / "bomb"]
    env = {**os.environ, **ONE_THREAD}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    expected = "labels: expected 18 bytes for an array of shape (2, 3), got at least 19\n"
    assert done.stdout == expected


def test_file_of_terabytes(tmp_path):
    write_mnist(tmp_path, gzipped=False)
    os.truncate(tmp_path / "train-images-idx3-ubyte", 1 << 40)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte: expected at most 1073741824"):
        data.load("mnist", tmp_path)


def test_error_for_labels_that_are_no_digits(tmp_path):
    write_mnist(tmp_path, gzipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(90, 10)))
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte: expected digits, got the la"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 4), np.uint8)}, "KeyError: 'y is not a file in the archive'"),
        ({"x": np.zeros((3, 4)), "y": np.zeros(3, np.uint8)}, "got float64 (3, 4), uint8 (3,)"),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.array([1, 2, 10], np.uint8)},
            "ValueError: expected 3 digits, got 3 labels up to 10",
        ),
        (
            {"x": np.zeros((3, 4), np.uint8), "y": np.zeros(2, np.uint8)},
            "ValueError: expected 3 digits, got 2 labels up to 0",
        ),
        ({"x": np.array([None]), "y": np.zeros(1, np.uint8)}, "Object arrays cannot be loaded"),
        ({"x": np.zeros((3, 4), np.uint8), "y": np.zeros(1 << 20)}, "expected at most 1048576 by"),
        (None, "BadZipFile"),
    ],
)
def test_cache_of_something_else(arrays, message, empty_cache, monkeypatch):
    monkeypatch.setattr(data, "MOST_BYTES", 1 << 20)
    empty_cache.mkdir(parents=True)
    path = empty_cache / "train.npz"
    if arrays is None:
        path.write_bytes(b"PK\3\4")
    else:
        np.savez_compressed(path, **arrays)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: delete it")) as caught:
        data.load("mnist")
    assert message in str(caught.value)


def test_error_for_a_missing_file(tmp_path):
    write_mnist(tmp_path, gzipped=False)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    message = f"{tmp_path} contains neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        data.load("mnist", tmp_path)


def test_error_for_labels_of_other_images(tmp_path):
    write_mnist(tmp_path, gzipped=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(89)))
    with pytest.raises(ValueError, match=r"train-images.* has 90 images, but .* has 89 labels"):
        data.load("mnist", tmp_path)


def test_error_for_an_unknown_data_set():
    with pytest.raises(ValueError, match="unknown data set 'letters'; expected 'digits' or"):
        data.load("letters")


@pytest.fixture
def empty_cache(tmp_path):
    before = get_dataset_root()
    set_dataset_root(str(tmp_path / "cache"))
    yield tmp_path / "cache/pfnet/chainer/mnist"
    set_dataset_root(before)


def test_mnist_is_downloaded_into_the_cache_of_chainer(empty_cache, tmp_path, monkeypatch):
    from chainer.datasets import get_mnist

    absent = (tmp_path / "absent").as_uri() + "/"
    files = write_mnist(tmp_path / "mirror", gzipped=True)
    monkeypatch.setattr(data, "SHA256", digests_of(files))
    monkeypatch.setattr(data, "MIRRORS", (absent, files.as_uri() + "/"))
    assert_is_what_was_written(data.load("mnist"))

    monkeypatch.setattr(data, "MIRRORS", ())
    assert_is_what_was_written(data.load("mnist"))
    assert_is_what_was_written(get_mnist())


def digests_of(files: Path) -> dict[str, str]:
    return {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.glob("*.gz")
    }


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Return a function that serves a folder over HTTP and returns its URL."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path) -> str:
            handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, args=[0.01]).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}/"

        yield start


def test_a_mirror_with_another_file_is_not_believed(empty_cache, serve, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    right = write_mnist(tmp_path / "right", gzipped=True)
    other = write_mnist(tmp_path / "other", gzipped=True, train=91)
    expected, got = digests_of(right), digests_of(other)
    monkeypatch.setattr(data, "SHA256", expected)
    monkeypatch.setattr(data, "MIRRORS", [serve(other)])
    with pytest.raises(ConnectionError) as caught:
        data.load("mnist")
    name = "train-images-idx3-ubyte"
    refusal = f"{name}.gz: expected SHA-256 {expected[name]}, got {got[name]}"
    assert refusal in str(caught.value)
    assert not list(empty_cache.iterdir())

    monkeypatch.setattr(data, "MIRRORS", [*data.MIRRORS, serve(right)])
    assert_is_what_was_written(data.load("mnist"))


def test_a_mirror_that_never_ends_is_not_read_to_the_end(empty_cache, tmp_path, monkeypatch):
    files = write_mnist(tmp_path, gzipped=True)
    monkeypatch.setattr(data, "SHA256", digests_of(files))
    monkeypatch.setattr(data, "MIRRORS", [files.as_uri() + "/"])
    size = (files / "train-images-idx3-ubyte.gz").stat().st_size
    monkeypatch.setattr(data, "LARGEST", size - 2)
    with pytest.raises(ConnectionError, match="expected SHA-256"):
        data.load("mnist")


def test_error_without_a_network_names_two_other_ways(empty_cache, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(data, "MIRRORS", ("http://127.0.0.1:9/", "http://127.0.0.1:9/mnist/"))
    with pytest.raises(ConnectionError) as caught:
        data.load("mnist")
    message = str(caught.value)
    assert message.count("refused") == 2
    assert re.search("--data DIR, a folder with the files\n  train-images-idx3-ubyte.gz,", message)
    assert f"to {empty_cache}." in message
    assert not list(empty_cache.iterdir())


# The scripts, and the README


def lines_of(name: str) -> list[str]:
    return (HERE / name).read_text().splitlines()


def test_scripts_differ_in_nothing_but_the_tutorial():
    diff = list(difflib.ndiff(lines_of("train_single.py"), lines_of("train.py")))
    removed = [line[2:].strip() for line in diff if line.startswith("- ")]
    added = [line[2:].strip() for line in diff if line.startswith("+ ")]
    assert removed == [
        'device = chainer.get_device("@cupy:0" if args.gpu else "@numpy")',
        "device.use()",
        "train, validation = data.load(args.dataset, args.data)",
        'load_weights(Path(args.out, "best.npz"), network)',
        'print(f"{evaluator()[ACCURACY]:.2%} of the validation data read correctly")',
        "add_reports(trainer, network, args)",
        "if args.resume:",
        "chainer.serializers.load_npz(args.resume, trainer)",
        "print_summary(trainer)",
    ]
    unlike = [line for line in added if not re.search(r"\bcomm|chainermn", line)]
    assert unlike == [
        'load_weights(Path(args.out, "best.npz"), network)',
        "accuracy = evaluator()[ACCURACY]",
        'print(f"{accuracy:.2%} of the validation data read correctly")',
        'settings = {key: vars(args)[key] for key in ("dataset", "model", "unit", "batchsize", '
        '"seed")}',
        "snapshot.resume(trainer, args.resume)",
        "print_summary(trainer)",
    ]
    assert len(added) == 32


def test_readme_shows_how_the_scripts_differ():
    shown = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    pairs = ["train_single.py", "train.py"], ["train_model_parallel.py", "train_dual_parallel.py"]
    for text, names in zip(shown, pairs, strict=True):
        diff = difflib.unified_diff(*map(lines_of, names), *names, n=1, lineterm="")
        assert [line for line in text.splitlines() if not line.startswith("@@")] == [
            line for line in diff if not line.startswith("@@")
        ]
