"""Lists and mean of folders laid out as ILSVRC2012."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SYNSETS = ["n01440764", "n01443537", "n02066245"]


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30 + seed, 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def ilsvrc(tmp_path) -> Path:
    root = tmp_path / "ilsvrc"
    for i in range(13):
        synset = SYNSETS[i % 3]
        write_image(root / "train" / synset / f"{synset}_{i}.JPEG", i)
    for i in range(1, 5):
        write_image(root / "val" / f"ILSVRC2012_val_{i:08}.JPEG", 20 + i)
    (root / "val.txt").write_text(
        "".join(f"ILSVRC2012_val_{i:08}.JPEG {i % 3}\n" for i in range(1, 5))
    )
    return root


def test_same_for_any_number_of_ranks(start, app, ilsvrc, tmp_path):
    results = []
    for ranks in (1, 3):
        out = tmp_path / f"out{ranks}"
        options = ["../ilsvrc", "--out", ".", "--size", 32]
        out.mkdir()
        shown = start(ranks, "prepare.py", *options, cwd=out).stdout
        assert "mean colour: 100%" in shown
        assert shown.count("over 13 images") == 1
        results.append({path.name: path.read_text() for path in out.iterdir()})
    assert results[0] == results[1]

    assert results[0]["classes.txt"].split() == SYNSETS
    train = app.data.ImageList.read(out / "train.txt")
    assert len(train) == 13
    assert train[0] == (f"train/{SYNSETS[0]}/{SYNSETS[0]}_0.JPEG", 0)
    validation = app.data.ImageList.read(out / "val.txt")
    assert validation[3] == ("val/ILSVRC2012_val_00000004.JPEG", 1)

    choose = partial(app.images.centre_box, share=1)
    whole = [app.images.read_image(ilsvrc / train[i][0], 32, choose) for i in range(13)]
    statistics = json.loads(results[0]["mean.json"])
    pixels = np.stack(whole).astype(np.float64)
    np.testing.assert_allclose(statistics["mean"], pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(statistics["deviation"], pixels.std(axis=(0, 2, 3)), rtol=1e-9)


def test_unreadable_file_is_named(start, ilsvrc, tmp_path):
    broken = ilsvrc / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
    broken.write_bytes(broken.read_bytes()[:500])
    job = start(2, "prepare.py", ilsvrc, "--out", tmp_path / "a", cwd=tmp_path, fails=True)
    assert str(broken) in job.stderr
    job = start(2, "prepare.py", ilsvrc, "--skip-unreadable", cwd=tmp_path)
    assert f"skipped: {broken} on " in job.stdout
    assert "over 12 images" in job.stdout


NUMBERS = dict(zip(SYNSETS, range(3), strict=True))
NAMES = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("val.txt", f"{NAMES[1]} 0\n{NAMES[0]} 2\n"),
        ("val.txt", f"x/{NAMES[0]} n02066245\nx/{NAMES[1]} n01440764\n"),
        ("labels.txt", "n02066245\nn01440764\n"),
        (
            "LOC_val_solution.csv",
            "ImageId,PredictionString\n"
            "ILSVRC2012_val_00000002,n01440764 1 2 3 4 n01440764 1 2 3 4\n"
            "ILSVRC2012_val_00000001,n02066245 1 2 3 4 \n",
        ),
    ],
)
def test_ground_truth(app, name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert app.prepare.read_ground_truth(tmp_path / name, NAMES, NUMBERS) == [2, 0]


def test_ground_truth_of_the_development_kit(app, tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O")]
    rows = [(7, "n02066245"), (3, "n01440764"), (5, "n01443537")]
    scipy_io.savemat(tmp_path / "meta.mat", {"synsets": np.array(rows, kind)})
    (tmp_path / "truth.txt").write_text("7\n3\n")
    assert app.prepare.read_ground_truth(tmp_path / "truth.txt", NAMES, NUMBERS) == [2, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("n02066245\n", "1 lines for 2 images"),
        (f"{NAMES[0]} 1\nother.JPEG 1\n", "names other images"),
        ("n02066245\nn99999999\n", "n99999999"),
        (f"{NAMES[0]} 1\n{NAMES[1]} 3\n", "numbers from 0 to 2"),
    ],
)
def test_error_for_what_is_no_ground_truth(app, content, message, tmp_path):
    (tmp_path / "val.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        app.prepare.read_ground_truth(tmp_path / "val.txt", NAMES, NUMBERS)


def test_synset_folders_of_validation_images(app, ilsvrc, tmp_path):
    for i, synset in enumerate(SYNSETS):
        write_image(ilsvrc / "folders" / synset / f"{i}.JPEG", i)
    arguments = {"ilsvrc": ilsvrc, "train": None, "val": "folders", "out": tmp_path}
    app.prepare.write_lists(Namespace(**arguments, ground_truth=None))
    listed = app.data.ImageList.read(tmp_path / "val.txt")
    assert [listed[i][1] for i in range(3)] == [0, 1, 2]


def test_error_without_images(app, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder called like n01440764"):
        app.prepare.write_lists(Namespace(ilsvrc=tmp_path, train=None))
