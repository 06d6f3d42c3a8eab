"""Output of predict.py for files and folders, with untrained weights."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda
from PIL import Image

from chainermn.testing.traps import set_traps

CLASSES = ["ant", "bee", "cat", "dog", "eel", "fox"]
MEAN, DEVIATION = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]
FILES = ["a.jpg", "g.bmp", "b/c.png", "b/d.gif", "b/e/f.webp"]


def write_weights(app, folder: Path, name: str, seed: int) -> chainer.Chain:
    np.random.seed(seed)
    network = app.models.ARCHITECTURES["small"](len(CLASSES))
    chainer.serializers.save_npz(folder / name, network)
    return network


@pytest.fixture
def place(app, tmp_path, monkeypatch) -> Path:
    """Change to a folder with a network in ``result`` and images in ``images``."""
    (tmp_path / "result").mkdir()
    known = {"arch": "small", "insize": 48, "classes": CLASSES}
    known |= {"mean": MEAN, "deviation": DEVIATION}
    (tmp_path / "result" / "model.json").write_text(json.dumps(known))
    random = np.random.default_rng(0)
    for i, name in enumerate(FILES):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (60, 50 + i, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def predict(app, place, capsys):
    """Return a function that runs predict.py and returns its exit status, output and errors."""

    def run(*arguments: object) -> tuple[int | str, str, str]:
        try:
            status = app.predict.main(list(map(str, arguments)))
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def expected_shares(app, network: chainer.Chain, files: list[Path]) -> np.ndarray:
    choose = partial(app.images.center_box, share=0.875)
    to_batch = app.data.ToBatch(MEAN, DEVIATION)
    x, _ = to_batch([(app.images.read_image(path, 48, choose), np.int32(0)) for path in files])
    with chainer.using_config("train", False):
        return F.softmax(network(x)).array


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("batchsize", [1, 3, 32])
def test_folders_in_batches(app, place, predict, batchsize):
    write_weights(app, place / "result", "model.npz", 1)
    network = write_weights(app, place / "result", "best.npz", 2)
    status, out, err = predict("images/b", "images", "--batchsize", batchsize, "--csv", "t.csv")
    assert (status, err) == (0, "")
    files = [Path("images", name) for name in (*FILES[2:], *FILES)]
    shares = expected_shares(app, network, files)
    rows = read_table(place / "t.csv")
    assert [Path(row["file"]) for row in rows] == files
    for row, expected in zip(rows, shares, strict=True):
        order = np.argsort(-expected)[:5]
        assert [row[f"class {i}"] for i in range(1, 6)] == [CLASSES[label] for label in order]
        found = [float(row[f"share {i}"]) for i in range(1, 6)]
        np.testing.assert_allclose(found, expected[order], rtol=1e-4)
    lines = out.splitlines()
    assert lines[::6] == [str(path) for path in files]
    assert lines[1].split() == [f"{float(rows[0]['share 1']):.1%}", rows[0]["class 1"]]


def test_last_weights_where_there_are_no_best(app, place, predict):
    last = write_weights(app, place / "result", "model.npz", 1)
    predict("images/a.jpg", "--csv", "t.csv")
    write_weights(app, place / "result", "best.npz", 2)
    predict("images/a.jpg", "--model", "result/model.npz", "--csv", "u.csv")
    assert (place / "t.csv").read_text() == (place / "u.csv").read_text()
    expected = expected_shares(app, last, [Path("images/a.jpg")]).max()
    assert float(read_table(place / "t.csv")[0]["share 1"]) == pytest.approx(expected, rel=1e-4)


def test_unreadable_files_are_named_and_counted(app, place, predict):
    write_weights(app, place / "result", "best.npz", 1)
    Path("images/b/c.png").write_bytes(b"no image")
    status, _, err = predict("images", "missing.jpg", "--batchsize", 2, "--csv", "t.csv")
    assert status == 1
    first, second, count = err.splitlines()
    assert first.startswith("images/b/c.png: ValueError: expected a picture in one of ")
    assert second.startswith("missing.jpg: FileNotFoundError: ")
    assert count == "2 of 6 files cannot be read"
    assert [row["file"] for row in read_table(place / "t.csv")] == [
        f"images/{name}" for name in FILES if name != "b/c.png"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"arch": "other"},
            "'arch': expected one of alex, googlenet, googlenetbn, nin, resnet101, ",
        ),
        ({"classes": "abc"}, "'classes': expected a list, got 'abc'"),
        ({"classes": []}, "expected 1 to lists.MOST_CLASSES = 100000 classes, got 0"),
        ({"classes": ["a"] * 100_001}, "lists.MOST_CLASSES = 100000 classes, got 100001"),
        ({"classes": ["a", 1]}, "'classes'[1]: expected a string, got 1"),
        ({"insize": 10**12}, "'insize': expected an integer from 1 to 1024, got 1000000000000"),
        ({"mean": [1, 2]}, "'mean': expected a list of 3, got [1, 2]"),
        ({"deviation": [1, 2, None]}, "'deviation'[2]: expected a finite number, got None"),
    ],
)
def test_other_description_gives_one_line(app, place, predict, change, message):
    write_weights(app, place / "result", "best.npz", 1)
    path = Path("result/model.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    status, _, err = predict("images")
    file = "result/best.npz" if "MOST_CLASSES" in message else path
    assert status.startswith(f"error: {file}: ")
    assert message in status
    assert err == ""


def test_wrong_input_gives_one_line(app, place, predict):
    write_weights(app, place / "result", "best.npz", 1)
    np.savez(place / "result" / "other.npz", W=np.zeros(1))
    (place / "damaged").mkdir()
    for copy in ("damaged/best.npz", "alone.npz"):
        (place / copy).write_bytes(Path("result/best.npz").read_bytes())
    (place / "damaged" / "model.json").write_text('{"arch": "small", "mean": [1, 2, 3]}')
    names = app.models.torchvision.NAMES["resnet50"].values()
    (place / "theirs").mkdir()
    from safetensors.numpy import save_file  # not on all machines with a GPU

    save_file({name: np.zeros(1) for name in names}, place / "theirs" / "w.pth")
    shutil.copy(place / "result" / "model.json", place / "theirs")
    (place / "result" / "a.jpg").write_bytes(Path("images/a.jpg").read_bytes())
    set_traps(place / "result" / "best.npz", place / "result" / "strange.npz", place / "trapped")
    for arguments, message in (
        (["--model", "other/best.npz"], "no trained network other/best.npz: train first, such "),
        (["--model", "result/missing.npz"], "there is no trained network result/missing.npz"),
        (["--model", "result/other.npz"], "does not have the weights of small for 6 classes"),
        (["--model", "alone.npz"], "file of export.py, got alone.npz"),
        (["--model", "theirs/w.pth"], "file of export.py, got theirs/w.pth"),
        (["--model", "damaged/best.npz"], "model.json: 'classes' is missing"),
        (["--model", "images/a.jpg"], "images/a.jpg is not an NPZ file"),
        (["--model", "result/strange.npz"], "in result/strange.npz is a pickle of more than None"),
        (["--model", "result/a.jpg"], "result/a.jpg is not an NPZ file"),
        (["--csv", "missing/t.csv"], "No such file or directory: 'missing/t.csv'"),
        (["damaged"], "damaged contains no image"),
    ):
        status, out, _ = predict("images", *arguments)
        assert status.startswith("error: ")
        assert message in status
        assert "\n" not in status
        assert out == ""
    assert not (place / "trapped").exists()


def test_nothing_has_been_trained(app, place, predict):
    status, _, _ = predict("images")
    assert status == (
        "error: there is no trained network result/best.npz: train first, such as with `mpiexec "
        f"-n 2 python {os.path.relpath(app.trained.__file__.replace('trained', 'train'))} --out "
        "result`, or name the file of another"
    )


def test_error_without_a_gpu(app, place, predict):
    if cuda.available:
        pytest.skip("there is a GPU")
    write_weights(app, place / "result", "best.npz", 1)
    status, _, _ = predict("images", "--gpu")
    assert status.startswith("error: CUDA environment is not correctly set up")


@pytest.mark.nightly
def test_reader_that_stops_reading(app, place):
    """As ``predict.py | head`` does."""
    write_weights(app, place / "result", "best.npz", 1)
    command = [sys.executable, Path(app.predict.__file__), "images"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=100)
    assert (errors, process.returncode) == ("", -signal.SIGPIPE)


@pytest.mark.gpu
def test_same_on_a_gpu(app, place, predict):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    write_weights(app, place / "result", "best.npz", 1)
    predict("images", "--csv", "cpu.csv")
    assert predict("images", "--gpu", "--csv", "gpu.csv")[0] == 0
    for row, other in zip(read_table("cpu.csv"), read_table("gpu.csv"), strict=True):
        assert row["class 1"] == other["class 1"]
        assert float(row["share 1"]) == pytest.approx(float(other["share 1"]), rel=1e-3)
