"""Train on a few ranks and check what comes out."""

import contextlib
import difflib
import functools
import gzip
import hashlib
import io
import json
import math
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.dataset import get_dataset_root, set_dataset_root
from numpy.lib.stride_tricks import sliding_window_view

import chainermn
from chainermn.testing.modules import import_modules
from chainermn.testing.mpiexec import direct_environment, mpiexec_command, run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
ACCURACY = "validation/main/accuracy"
# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300


data = import_modules(HERE, ["data"]).data


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


# Training


@pytest.fixture(scope="module")
def two_ranks(app, run, tmp_path_factory) -> tuple[str, Path]:
    """Train for four epochs; return what this rank prints, and the folder."""
    comm = chainermn.create_communicator()
    out = comm.bcast_obj(tmp_path_factory.mktemp("two_ranks") / "result")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(app.train.main, "--epoch", "4", "--unit", "50", "--out", out)
    return printed.getvalue(), out


PNG = b"\x89PNG\r\n\x1a\n"
ITERATIONS = math.ceil(719 / 30)  # per epoch, on two ranks


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_what_is_written(two_ranks):
    _, out = two_ranks
    plots = ["accuracy.png", "examples.png", "loss.png"]
    snapshots = [f"snapshot_iter_{n * ITERATIONS}.0" for n in (2, 3, 4)]
    others = ["best.json", "best.npz", "log", "model.npz", "run.json"]
    assert sorted(path.name for path in out.glob("[!.]*")) == sorted([*others, *plots, *snapshots])
    for name in plots:
        assert (out / name).read_bytes().startswith(PNG)
    record = json.loads((out / "run.json").read_text())
    assert record["ranks"] == 2
    assert record["arguments"]["epoch"] == 4
    log = read_log(out)
    assert [row["epoch"] for row in log] == [1, 2, 3, 4]
    assert all(row["images/s"] > 0 for row in log)
    losses = [row["validation/main/loss"] for row in log]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    printed, out = two_ranks
    comm = chainermn.create_communicator()
    if comm.rank == 1:
        assert printed == ""
        return
    lines = printed.splitlines()
    first, *table = lines[:12]
    header, *rows, summary, best, files = lines[12:]
    assert table[:2] == ["class     train  validate", "    0 0     147        31"]
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert header.split()[:2] == ["epoch", "main/loss"]
    assert [row.split()[0] for row in rows] == [str(epoch) for epoch in range(1, 5)]
    accuracies = [row[ACCURACY] for row in read_log(out)]
    of = "of the validation data read correctly"
    assert summary == f"{accuracies[-1]:.2%} {of} after 4 epochs"
    epoch = 1 + accuracies.index(max(accuracies))
    assert best == f"the best: {max(accuracies):.2%} after epoch {epoch}"
    names = "accuracy.png,loss.png,log,best.npz,model.npz"
    assert files == f"curves, log and networks: {out}/{{{names}}}"
    assert "\033" not in printed


@pytest.mark.nightly
@pytest.mark.mpi(2, timeout=LIMIT)
def test_as_many_epochs_as_by_default(app, run, shared_tmp_path):
    run(app.train.main, "--out", shared_tmp_path)
    assert read_log(shared_tmp_path)[-1][ACCURACY] > 0.97


@pytest.mark.mpi(1, 2, timeout=LIMIT)
def test_any_number_of_ranks_prints_nothing_if_it_should_be_quiet(
    app, run, shared_tmp_path, mpi_ranks, capfd
):
    # Written to the file descriptor, which capfd restores, as a script's output is.
    with open(1, "w", closefd=False) as output, contextlib.redirect_stdout(output):
        print("before", flush=True)
        options = ["--epoch", "1", "--batchsize", "20", "--unit", "20", "--quiet"]
        run(app.train.main, *options, "--out", shared_tmp_path)
    assert capfd.readouterr().out == "before\n"
    (row,) = read_log(shared_tmp_path)
    assert row["iteration"] == math.ceil(math.ceil(1437 / mpi_ranks) / 20)
    assert not row["main/loss"] > math.log(10)


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    options = ["--gpu", "--epoch", "6"]
    out = tmp_path / "result"
    job = run_job(1, [HERE / "train.py", *options, "--out", out], cwd=tmp_path)
    assert job.returncode == 0, job
    assert read_log(out)[-1][ACCURACY] > 0.93


def assert_equal_networks(one: Path, other: Path) -> None:
    with np.load(one) as first, np.load(other) as second:
        assert sorted(first) == sorted(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_finished_run_is_extended_with_more_epochs(app, run, two_ranks, shared_tmp_path, capsys):
    _, whole = two_ranks
    is_root = chainermn.create_communicator().rank == 0
    options = ["--unit", "50", "--out", shared_tmp_path]
    run(app.train.main, *options, "--epoch", "2")
    for epochs in ("1", "2"):
        capsys.readouterr()
        run(app.train.main, *options, "--epoch", epochs)
        ended = "Training has ended there, after 2 epochs: ask for more"
        assert (ended in capsys.readouterr().err) == is_root
        assert [row["epoch"] for row in read_log(shared_tmp_path)] == [1, 2]
    run(app.train.main, *options, "--epoch", "4")
    for name in ("model.npz", "best.npz"):
        assert_equal_networks(shared_tmp_path / name, whole / name)
    for row, straight in zip(read_log(shared_tmp_path), read_log(whole), strict=True):
        for key in ("iteration", "main/loss", ACCURACY):
            assert row[key] == straight[key]


@pytest.mark.mpi(3, timeout=LIMIT)
def test_resumed_from_another_folder_with_another_number_of_ranks(
    app, run, shared_tmp_path, monkeypatch, capsys
):
    comm = chainermn.create_communicator()
    part = comm.split(comm.rank // 2, comm.rank)
    first, third = shared_tmp_path / "first", shared_tmp_path / "third"
    if comm.rank < 2:
        with monkeypatch.context() as patch:
            patch.setattr(chainermn, "create_communicator", lambda *_: part)
            run(app.train.main, "--unit", "20", "--epoch", "1", "--out", first)
    comm.bcast_obj(None)
    capsys.readouterr()
    snapshot = first / f"snapshot_iter_{ITERATIONS}.0"
    options = ["--unit", "20", "--epoch", "2", "--out", third, "--resume", snapshot]
    run(app.train.main, *options)
    resuming = f"resuming after iteration {ITERATIONS}, epoch 1, from "
    assert (resuming in capsys.readouterr().out) == (comm.rank == 0)
    assert [row["epoch"] for row in read_log(third)] == [1, 2]


@pytest.mark.mpi(1, 2, 3, timeout=LIMIT)
def test_evaluation_is_exact_where_ranks_do_not_divide_the_data(app, run, shared_tmp_path, capsys):
    comm = chainermn.create_communicator()
    files, out = shared_tmp_path / "mnist", shared_tmp_path
    expected = np.empty(1)
    if comm.rank == 0:
        write_mnist(files, gzipped=False, test=31, size=(20, 30))
        # Some digits are read wrong and some right, as after a few steps of training.
        write_weights(app, out / "best.npz", 20 * 30)
        _, validation = data.load("mnist", files)
        expected[0] = np.mean(read_correctly(out / "best.npz", validation))
    expected = comm.bcast(expected)
    assert 0 < expected < 1
    options = ["--dataset", "mnist", "--data", files, "--batchsize", "4", "--evaluate"]
    run(app.train.main, *options, "--out", out)
    shown = [f"{expected[0]:.2%} of the validation data read correctly"] * (comm.rank == 0)
    assert capsys.readouterr().out.splitlines()[1:] == shown
    assert not (out / "log").exists()


@pytest.mark.mpi(2, timeout=LIMIT)
def test_weights_and_snapshots_of_other_images_are_refused(app, run, shared_tmp_path, capsys):
    comm = chainermn.create_communicator()
    files = [shared_tmp_path / name for name in ("first", "other", "small")]
    if comm.rank == 0:
        for folder, n, width in zip(files, (90, 91, 90), (10, 10, 5), strict=True):
            write_mnist(folder, gzipped=False, train=n, size=(10, width))
    comm.bcast_obj(None)
    options = ["--dataset", "mnist", "--unit", "20", "--epoch", "1", "--out", shared_tmp_path]
    options = [*map(str, options), "--data"]
    run(app.train.main, *options, files[0])
    refused = error_of(app.train.main, [*options, str(files[1])], capsys)
    assert re.search(r"was written with other settings \(images: '\w+', now '\w+'\)", refused)
    evaluate = ["--evaluate", *options, str(files[2])]
    scripts = app.train, app.train_model_parallel, app.train_dual_parallel
    for script in scripts:
        refused = error_of(script.main, evaluate, capsys)
        assert "weights of another network: --model, --unit, the size of the images" in refused
        assert "\n" not in refused


def write_weights(app, path: Path, n_pixels: int) -> None:
    """Save an MLP with its initial weights."""
    np.random.seed(4)
    network = app.model.MLP(200, 10)
    network(np.zeros((1, n_pixels), np.float32))
    chainer.serializers.save_npz(path, network)


def fit_last_layer(path: Path, examples) -> None:
    """Change the last layer of an MLP so that it reads most of these images correctly."""
    with np.load(path) as saved:
        arrays = dict(saved)
    h, digits = hidden(arrays, examples)
    # Ridge regression.
    weights = np.linalg.solve(h.T @ h + 1e-3 * np.eye(200), h.T @ np.eye(10)[digits])
    arrays["l3/W"] = weights.T.astype(np.float32)
    np.savez(path, **arrays)


def hidden(arrays, examples) -> tuple[np.ndarray, np.ndarray]:
    """Return what the last layer of an MLP gets, by NumPy alone, and the digits."""
    images, digits = zip(*examples, strict=True)
    h = np.stack(images).astype(np.float64).reshape(len(images), -1)
    for layer in ("l1", "l2"):
        h = np.maximum(h @ arrays[f"{layer}/W"].T + arrays[f"{layer}/b"], 0)
    return h, np.array(digits)


def read_correctly(path: Path, examples) -> np.ndarray:
    """Return which images an MLP reads correctly."""
    with np.load(path) as arrays:
        h, digits = hidden(arrays, examples)
        return (h @ arrays["l3/W"].T + arrays["l3/b"]).argmax(axis=1) == digits


@pytest.mark.mpi(2, timeout=LIMIT)
def test_convolutional_network_learns(app, run, shared_tmp_path, monkeypatch):
    """The log has the loss that NumPy computes with the network that is saved."""
    few = [part[:n] for part, n in zip(data.load("digits"), (240, 60), strict=True)]
    # Images need not be square.
    few = [([image[:, 2:6] for image, _ in part], [digit for _, digit in part]) for part in few]
    few = [chainer.datasets.TupleDataset(*part) for part in few]
    monkeypatch.setattr(app.data, "load", lambda *_: few)
    options = ["--model", "cnn", "--unit", "30", "--epoch", "2", "--tensorboard"]
    run(app.train.main, *options, "--out", shared_tmp_path)
    first, last = read_log(shared_tmp_path)
    assert last["main/loss"] < first["main/loss"]
    images, digits = (np.stack(part) for part in zip(*few[1], strict=True))
    with np.load(shared_tmp_path / "model.npz") as saved:
        h = images[:, None]
        for name in ("conv1", "conv2"):
            windows = sliding_window_view(
                np.pad(h, [(0, 0), (0, 0), (1, 1), (1, 1)]), (3, 3), (2, 3)
            )
            h = np.einsum("nchwij,ocij->nohw", windows, saved[f"{name}/W"].astype(np.float64))
            h = np.maximum(h + saved[f"{name}/b"][:, None, None], 0)
            h = h.reshape(*h.shape[:2], h.shape[2] // 2, 2, -1, 2).max(axis=(3, 5))
        h = np.maximum(h.reshape(len(h), -1) @ saved["l1/W"].T + saved["l1/b"], 0)
        y = h @ saved["l2/W"].T + saved["l2/b"]
    loss = np.mean(np.log(np.exp(y).sum(axis=1)) - y[np.arange(len(y)), digits])
    assert last["validation/main/loss"] == pytest.approx(loss, rel=1e-5)
    assert last[ACCURACY] == pytest.approx(np.mean(y.argmax(axis=1) == digits), rel=1e-6)
    (events,) = (shared_tmp_path / "tensorboard").iterdir()
    assert ACCURACY.encode() in events.read_bytes()


@pytest.mark.parametrize("script", ["train", "train_single"])
def test_graphs_need_a_gpu(app, script, capsys):
    with pytest.raises(SystemExit, match="2"):
        getattr(app, script).main(["--graphs"])
    assert capsys.readouterr().err.endswith("error: --graphs needs --gpu\n")


def error_of(main, arguments: list[str], capsys) -> str:
    """Return the line with which a script ends on rank 0; the others end silently."""
    comm = chainermn.create_communicator()
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert capsys.readouterr().err == ""
    codes = comm.allgather_obj(caught.value.code)
    assert codes[1:] == [1] * (comm.size - 1)
    assert codes[0].startswith("error: ")
    return codes[0]


@pytest.mark.mpi(2, timeout=LIMIT)
def test_input_that_is_wrong_ends_all_ranks_with_one_line(
    app, two_ranks, shared_tmp_path, monkeypatch, capsys
):
    cases = [
        (
            ["--evaluate", "--model", "cnn"],
            "weights of another network: --model, --unit, the size of the images and the number",
        ),
        (["--evaluate", "--out", "absent"], "no trained network absent/best.npz: train first"),
        (["--resume", "absent"], "No such file or directory: 'absent'"),
        (["--resume", "snapshot.0"], "in snapshot.0 is a pickle of more than None, numbers and"),
        (["--evaluate", "--out", "strange"], "in strange/best.npz is a pickle of more than None"),
        (["--unit", "20"], "was written with other settings (unit: 50, now 20). Use the same"),
        (["--out", "file/result"], "file/result"),
        (["--quiet", "--data", "."], "only --dataset mnist is read from a folder"),
        (["--dataset", "mnist", "--data", "bomb"], "t10k-labels-idx1-ubyte.gz: expected 38 bytes"),
        (
            ["--dataset", "mnist", "--data", "."],
            "contains no train-images-idx3-ubyte,",
        ),
    ]
    if not cuda.available:
        cases.append((["--gpu"], "no GPU can be used on "))
    comm = chainermn.create_communicator()
    monkeypatch.chdir(shared_tmp_path)
    if comm.rank == 0:
        Path("result").symlink_to(two_ranks[1])
        Path("file").touch()
        Path("strange").mkdir()
        snapshot, best = next(two_ranks[1].glob("snapshot_*.0")), two_ranks[1] / "best.npz"
        set_traps(snapshot, Path("snapshot.0"), Path("trapped"))
        set_traps(best, Path("strange/best.npz"), Path("trapped"))
        write_mnist(Path("bomb"), gzipped=True)
        path = Path("bomb/t10k-labels-idx1-ubyte.gz")
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(1 << 20)))
    comm.bcast_obj(None)
    for options, message in cases:
        arguments = ["--epoch", "5", "--unit", "50", *options]
        assert message in error_of(app.train.main, arguments, capsys)
    assert not Path("trapped").exists()


@pytest.mark.mpi(3, timeout=LIMIT)
def test_number_of_ranks_that_does_not_fit_ends_all_with_one_line(app, capsys):
    for main, message in (
        (app.train_model_parallel.main, "the network takes 2 ranks: start 2, not 3"),
        (app.train_dual_parallel.main, "each replica takes 2 ranks: start an even number, not 3"),
    ):
        assert error_of(main, [], capsys) == f"error: {message}"
        assert capsys.readouterr().out == ""


def test_predictions_wrong_ones_first(app, monkeypatch, tmp_path, capsys):
    weights, picture, drawn = tmp_path / "best.npz", tmp_path / "read.png", {}
    train, validation = data.load("digits")
    write_weights(app, weights, 64)
    fit_last_layer(weights, train)
    is_right = read_correctly(weights, validation)
    n_wrong = np.count_nonzero(~is_right)
    assert 0 < n_wrong < 36
    draw = app.predict.draw

    def look(images, digits, read, path):
        drawn.update(digits=digits, read=read)
        draw(images, digits, read, path)

    monkeypatch.setattr(app.predict, "draw", look)
    arguments = [str(weights), "--picture", str(picture)]
    app.predict.main(arguments)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{is_right.mean():.2%} of 360 images read correctly\n")
    wrong = drawn["digits"] != drawn["read"]
    assert wrong.tolist() == [True] * n_wrong + [False] * (36 - n_wrong)
    assert picture.read_bytes().startswith(PNG)
    draw(np.zeros((1, 20, 30)), np.array([1]), np.array([1]), tmp_path / "wide.png")
    assert (tmp_path / "wide.png").read_bytes().startswith(PNG)
    files = write_mnist(tmp_path / "mnist", gzipped=False)
    for other in (["--model", "cnn"], ["--dataset", "mnist", "--data", str(files)]):
        with pytest.raises(SystemExit, match="has the weights of another network"):
            app.predict.main([*arguments, *other])
    for wrong, message in [
        (["absent/best.npz"], "there is no trained network absent/best.npz: train first"),
        ([str(tmp_path)], f"{tmp_path} is a folder: name a file in it, such as best.npz"),
        ([str(weights), "--picture", "absent/a.png"], "No such file or directory: 'absent/a.png'"),
    ]:
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            app.predict.main(wrong)

    strange = tmp_path / "strange.npz"
    set_traps(weights, strange, tmp_path / "trapped")
    with pytest.raises(SystemExit, match=r"^error: .* in .*strange\.npz is a pickle of more"):
        app.predict.main([str(strange)])
    assert not (tmp_path / "trapped").exists()


def stop(process: subprocess.Popen) -> None:
    """Kill the leader of a session, and everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.each_mpi
def test_mpiexec_starts_the_script_itself_and_shows_a_live_view_on_a_terminal(tmp_path):
    terminal, end_of_mpiexec = os.openpty()
    script = Path(HERE.name, "train.py")
    command = mpiexec_command(2, [script, "--epoch", "1", "--out", tmp_path], python=False)
    with (tmp_path / "errors").open("wb") as errors:
        mpiexec = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env=direct_environment() | {"TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=end_of_mpiexec,
            stderr=errors,
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
    assert (tmp_path / "errors").read_text() == ""
    assert b"iteration 1 " in shown
    assert b" images/s " in shown
    assert shown.count(b"after 1 epoch\r\n") == 1
    assert read_log(tmp_path)[-1]["iteration"] == ITERATIONS


# Data


def test_digits_are_split_always_alike():
    parts, again = data.load("digits"), data.load("digits", "")
    assert [len(part) for part in parts] == [1437, 360]
    for part, same in zip(parts, again, strict=True):
        images, labels = part[:], [label for _, label in part[:]]
        pixels = np.stack([image for image, _ in images])
        assert (pixels.shape[1:], pixels.dtype, labels[0].dtype) == ((8, 8), np.float32, np.int32)
        assert (pixels.min(), pixels.max()) == (0, 1)
        assert set(labels) == set(range(10))
        assert labels == [label for _, label in same[:]]


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits  # takes a second, which every rank would wait for

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(1797)
    parts = data.load("digits")
    images, digits = zip(*(example for part in parts for example in part), strict=True)
    np.testing.assert_array_equal(np.stack(images), pixels[order].reshape(-1, 8, 8) / 16)
    assert list(digits) == labels[order].tolist()


def idx(array: np.ndarray) -> bytes:
    shape = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def write_mnist(
    directory: Path, *, gzipped: bool, train: int = 90, test: int = 30, size: tuple = (28, 28)
) -> Path:
    """Make files like MNIST's: picture ``i`` shows the digit ``i % 10`` as a bright row."""
    directory.mkdir(exist_ok=True)
    for part, n in (("train", train), ("t10k", test)):
        labels = np.arange(n) % 10
        images = np.zeros((n, *size))
        images[np.arange(n), labels] = 255
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = directory / f"{part}-{what}-ubyte{'.gz' * gzipped}"
            path.write_bytes(gzip.compress(idx(array)) if gzipped else idx(array))
    return directory


def assert_is_what_was_written(parts: tuple) -> None:
    assert [len(part) for part in parts] == [90, 30]
    image, label = parts[0][13]
    assert (image.shape, image.dtype, label, label.dtype) == ((28, 28), np.float32, 3, np.int32)
    np.testing.assert_array_equal(image.argmax(axis=0), 3)
    assert (image.min(), image.max()) == (0, 1)


@pytest.mark.parametrize("gzipped", [False, True])
def test_mnist_from_idx_files(gzipped, tmp_path):
    assert_is_what_was_written(data.load("mnist", write_mnist(tmp_path, gzipped=gzipped)))


def test_error_for_labels_that_are_no_digits(tmp_path):
    write_mnist(tmp_path, gzipped=False)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(idx(1 + np.arange(30) % 26))
    message = f"{path}: expected labels from 0 to 9 for 10 names, got 1 to 26: "
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load("mnist", tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(90)))
    with pytest.raises(ValueError, match=r"train-labels.*: expected examples of several classes"):
        data.load("mnist", tmp_path)


IMAGES = np.zeros((3, 784), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, "KeyError: 'y is not a file in the archive'"),
        ({"x": IMAGES / 2, "y": np.zeros(3, np.uint8)}, "got float64 (3, 784), uint8 (3,)"),
        (
            {"x": IMAGES, "y": np.array([1, 2, 10], np.uint8)},
            "ValueError: expected 3 digits, got 3 labels up to 10",
        ),
        (
            {"x": IMAGES, "y": np.zeros(2, np.uint8)},
            "ValueError: expected 3 digits, got 2 labels up to 0",
        ),
        (
            {"x": IMAGES[:, 1:], "y": np.zeros(3, np.uint8)},
            "expected unsigned bytes, 784 for an image, got uint8 (3, 783), uint8 (3,)",
        ),
        ({"x": np.array([None]), "y": np.zeros(1, np.uint8)}, "Object arrays cannot be loaded"),
        ({"x": IMAGES, "y": np.zeros(1 << 20)}, "expected at most 1048576 by"),
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
    assert_is_what_was_written(get_mnist(ndim=2))


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
        "train, validation = data.load_shown(args)",
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
        'settings["images"] = images',
        "snapshot.resume(trainer, args.resume)",
        "print_summary(trainer)",
    ]
    assert len(added) == 34


def test_readme_shows_how_the_scripts_differ():
    shown = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    pairs = ["train_single.py", "train.py"], ["train_model_parallel.py", "train_dual_parallel.py"]
    for text, names in zip(shown, pairs, strict=True):
        diff = difflib.unified_diff(*map(lines_of, names), *names, n=1, lineterm="")
        assert [line for line in text.splitlines() if not line.startswith("@@")] == [
            line for line in diff if not line.startswith("@@")
        ]
