"""Lists and means of image folders, and of files in MNIST's format."""

import csv
import gzip
import json
import re
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import chainermn

HERE = Path(__file__).resolve().parent
# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300

SYNSETS = ["n01440764", "n01443537", "n02066245"]


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30 + seed, 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def ilsvrc(on_rank_0, shared_tmp_path) -> Path:
    root = shared_tmp_path / "ilsvrc"

    def make() -> None:
        for i in range(13):
            synset = SYNSETS[i % 3]
            write_image(root / "train" / synset / f"{synset}_{i}.JPEG", i)
        for i in range(1, 5):
            write_image(root / "val" / f"ILSVRC2012_val_{i:08}.JPEG", 20 + i)
        (root / "val.txt").write_text(
            "".join(f"ILSVRC2012_val_{i:08}.JPEG {i % 3}\n" for i in range(1, 5))
        )

    on_rank_0(make)
    return root


@pytest.mark.mpi(3, timeout=LIMIT)
def test_same_for_any_number_of_ranks(
    app, run, only, ilsvrc, shared_tmp_path, monkeypatch, capsys
):
    results = []
    for ranks in (1, 3):
        out = shared_tmp_path / f"out{ranks}"
        out.mkdir(exist_ok=True)
        monkeypatch.chdir(out)
        with only(ranks) as is_seen:
            if is_seen:
                run(app.prepare.main, "../ilsvrc", "--out", ".", "--size", 32)
        shown = capsys.readouterr().out
        is_root = chainermn.create_communicator().rank == 0
        assert ("mean color: 100%" in shown) == is_root
        assert shown.count("over 13 images") == is_root
        results.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert results[0] == results[1]

    assert results[0]["classes.txt"].decode().split() == SYNSETS
    train = app.data.ImageList.read(out / "train.txt")
    assert len(train) == 13
    assert train[0] == (f"train/{SYNSETS[0]}/{SYNSETS[0]}_0.JPEG", 0)
    validation = app.data.ImageList.read(out / "val.txt")
    assert validation[3] == ("val/ILSVRC2012_val_00000004.JPEG", 1)

    choose = partial(app.images.center_box, share=1)
    whole = [app.images.read_image(ilsvrc / train[i][0], 32, choose) for i in range(13)]
    statistics = json.loads(results[0]["mean.json"])
    pixels = np.stack(whole).astype(np.float64)
    np.testing.assert_allclose(statistics["mean"], pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(statistics["deviation"], pixels.std(axis=(0, 2, 3)), rtol=1e-9)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_unreadable_file_is_named(app, run, fails, on_rank_0, ilsvrc, shared_tmp_path, capsys):
    broken = ilsvrc / "train" / SYNSETS[0] / f"{SYNSETS[0]}_0.JPEG"
    on_rank_0(lambda: broken.write_bytes(broken.read_bytes()[:500]))
    options = [ilsvrc, "--out", shared_tmp_path / "a"]
    assert str(broken) in fails(app.prepare.main, *options)
    run(app.prepare.main, *options, "--skip-unreadable")
    shown = capsys.readouterr().out
    is_root = chainermn.create_communicator().rank == 0
    assert (f"skipped: {broken} on " in shown) == is_root
    assert ("over 12 images" in shown) == is_root


NUMBERS = dict(zip(SYNSETS, range(3), strict=True))
NAMES = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("val.txt", f"{NAMES[1]} 0\n{NAMES[0]} 2\n"),
        ("val.txt", f"x/{NAMES[0]} n02066245\nx/{NAMES[1]} n01440764\n"),
        ("labels.txt", "\ufeffn02066245\r\nn01440764\r\n"),
        (
            "LOC_val_solution.csv",
            "ImageId,PredictionString\n"
            "ILSVRC2012_val_00000002,n01440764 1 2 3 4 n01440764 1 2 3 4\n"
            "ILSVRC2012_val_00000001,n02066245 1 2 3 4 \n",
        ),
    ],
)
def test_ground_truth(app, name, content, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert app.ilsvrc.read_ground_truth(tmp_path / name, NAMES, NUMBERS) == [2, 0]


def test_ground_truth_of_the_development_kit(app, tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O")]
    rows = [(7, "n02066245"), (3, "n01440764"), (5, "n01443537")]
    (tmp_path / "truth.txt").write_text("7\n3\n")
    for is_compressed in (False, True):
        variables = {"other": [1.0], "synsets": np.array(rows, kind)}
        scipy_io.savemat(tmp_path / "meta.mat", variables, do_compression=is_compressed)
        assert app.ilsvrc.read_ground_truth(tmp_path / "truth.txt", NAMES, NUMBERS) == [2, 0]


def test_development_kit_that_unpacks_to_megabytes(app, tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    (tmp_path / "truth.txt").write_text("7\n3\n")
    for size, message in ((1 << 22, "KeyError"), (1 << 23, "more than 8388608 bytes in it")):
        variables = {"other": np.zeros(size, np.uint8)}
        scipy_io.savemat(tmp_path / "meta.mat", variables, do_compression=True)
        assert (tmp_path / "meta.mat").stat().st_size < 10_000
        with pytest.raises(ValueError, match=rf"no meta\.mat of ILSVRC2012 .*{message}"):
            app.ilsvrc.read_ground_truth(tmp_path / "truth.txt", NAMES, NUMBERS)


def test_development_kit_of_something_else(app, tmp_path):
    pytest.importorskip("scipy.io")
    (tmp_path / "truth.txt").write_text("7\n3\n")
    for content, message in (
        (b"", "meta.mat: no meta.mat of ILSVRC2012"),
        (b"MATLAB 5.0 MAT-file" + bytes(200), "meta.mat: no meta.mat of ILSVRC2012"),
        (bytes((1 << 23) + 1), "meta.mat: expected at most 8388608 bytes, got 8388609"),
    ):
        (tmp_path / "meta.mat").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            app.ilsvrc.read_ground_truth(tmp_path / "truth.txt", NAMES, NUMBERS)


def test_table_of_ground_truth_that_is_none(app, tmp_path):
    path = tmp_path / "LOC_val_solution.csv"
    for content, message in (
        ("ImageId,PredictionString\nILSVRC2012_val_00000001\n", "'None' is missing"),
        ("other\n1\n", "'ImageId' is missing"),
        (f"ImageId,PredictionString\n{'a' * 200_000},b\n", "field larger than field limit"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            app.ilsvrc.read_ground_truth(path, NAMES, NUMBERS)


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
        app.ilsvrc.read_ground_truth(tmp_path / "val.txt", NAMES, NUMBERS)


def test_synset_folders_of_validation_images(app, ilsvrc):
    for i, synset in enumerate(SYNSETS):
        write_image(ilsvrc / "folders" / synset / f"{i}.JPEG", i)
    found = app.layouts.find_images(ilsvrc, val="folders")
    assert [label for _, label in found.val] == [0, 1, 2]


@pytest.fixture
def animals(on_rank_0, shared_tmp_path) -> Path:
    """Return folders of two classes, with files of many formats."""
    root = shared_tmp_path / "animals"
    endings = ["jpg", "PNG", "webp", "gif", "bmp", "tiff", "ppm", "jpeg"]

    def make() -> None:
        for name, n in (("zebra", 8), ("ant eater", 12)):
            for i in range(n):
                write_image(root / name / f"{name} {i:02}.{endings[i % 8]}", i)
        write_image(root / "zebra" / "more" / "inner.png", 30)
        write_image(root / "zebra" / ".thumbnails" / "small.png", 30)
        (root / "zebra" / "notes.txt").write_text("taken in June")

    on_rank_0(make)
    return root


@pytest.mark.mpi(3, timeout=LIMIT)
def test_own_images_become_a_model_in_two_commands(
    app, run, only, on_rank_0, animals, shared_tmp_path, capsys
):
    """Their names are not UTF-8, begin with a space or a mark, or hold other line breaks."""
    comm, out = chainermn.create_communicator(), shared_tmp_path / "lists"
    photos, names = (
        shared_tmp_path / "ph\udce9otos",
        [" ant\u2028eater $x$", "\ufeffz\udce9\x85bra"],
    )

    def rename() -> None:
        animals.rename(photos)
        for old, new in zip(["ant eater", "zebra"], names, strict=True):
            (photos / old).rename(photos / new)
        (photos / names[1] / "zebra 00.jpg").rename(photos / names[1] / " \udce9.jpg")

    on_rank_0(rename)
    lists = []
    for ranks in (1, 3):
        capsys.readouterr()
        with only(ranks) as is_seen:
            if is_seen:
                options = ["--hold-out", 0.25, "--out", out, "--size", 32]
                run(app.prepare.main, photos, *options)
        shown = comm.bcast_obj(capsys.readouterr().out)
        lists.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert lists[0] == lists[1]
    assert app.prepare.read_names(out / "classes.txt") == names
    assert len(shown[shown.index("16 images to train with, 5 to") :].splitlines()) <= 15
    assert "left out: 1 file .txt, such as " in shown
    assert "left out: 1 file, hidden or a system's" in shown
    train, val = (app.data.ImageList.read(out / f"{part}.txt") for part in ("train", "val"))
    assert (train.labels == 0).sum() == 9
    assert (train.labels == 1).sum() == 7
    assert len(val) == 5
    listed = {part[i] for part in (train, val) for i in range(len(part))}
    files = {path.relative_to(photos) for path in photos.rglob("*.*") if path.is_file()}
    files -= {Path(names[1], "notes.txt"), Path(names[1], ".thumbnails/small.png")}
    assert listed == {(str(path), names.index(path.parts[0])) for path in files}
    assert len(listed) == 21

    command = shown[shown.index("next: ") + 6 :].replace(
        f"$'{shared_tmp_path}/ph\\xe9otos'", "PHOTOS"
    )
    *mpiexec, script = shlex.split(command)[:4]
    assert (mpiexec, script) == (["mpiexec", "-n", "3"], str(HERE / "train.py"))
    options = [photos if word == "PHOTOS" else word for word in shlex.split(command)[4:]]
    assert photos in options
    options += ["--test", "--arch", "small", "--batchsize", 4, "--loaderjob", 0]
    run(app.train.main, *options, "--out", shared_tmp_path / "result")
    result, table = shared_tmp_path / "result/test", shared_tmp_path / "table.csv"
    assert json.loads((result / "model.json").read_text())["classes"] == names
    if comm.rank == 0:
        options = ["--model", result / "model.npz", "--csv", table]
        assert app.predict.main([str(photos), *map(str, options)]) == 0
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 21
        written = {name.encode(errors="backslashreplace").decode() for name in names}
        assert {rows[0]["class 1"], rows[0]["class 2"]} == written


def test_seed_decides_what_is_held_out(app, animals):
    first, same, other = (
        app.layouts.find_images(animals, hold_out=0.5, seed=seed).val for seed in (0, 0, 1)
    )
    assert first == same != other
    assert len(first) == len(other) == 10


def test_folders_to_train_and_to_validate_with(app, tmp_path):
    for i, name in enumerate(["train/b/0.png", "train/a/1.png", "valid/b/2.png"]):
        write_image(tmp_path / name, i)
    found = app.layouts.find_images(tmp_path)
    assert found.classes == ["a", "b"]
    assert found.train == [(f"{tmp_path}/train/a/1.png", 0), (f"{tmp_path}/train/b/0.png", 1)]
    assert found.val == [(f"{tmp_path}/valid/b/2.png", 1)]


def test_class_called_train(app, tmp_path):
    for i, name in enumerate(["train/0.png", "bus/1.png", "val/bus/2.png"]):
        write_image(tmp_path / name, i)
    assert app.layouts.find_images(tmp_path).classes == ["bus", "train"]


def idx_content(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def clothes(on_rank_0, shared_tmp_path) -> Path:
    """Return a folder of IDX files: 23 images to train on and 7 to test with, of three classes."""
    root = shared_tmp_path / "idx"

    def make() -> None:
        random = np.random.default_rng(0)
        root.mkdir()
        for prefix, n in (("train", 23), ("t10k", 7)):
            pixels = random.integers(0, 256, (n, 6, 5), np.uint8)
            labels = (np.arange(n) % 3).astype(np.uint8)
            (root / f"{prefix}-images-idx3-ubyte").write_bytes(idx_content(pixels))
            (root / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_content(labels))

    on_rank_0(make)
    return root


@pytest.mark.mpi(3, timeout=LIMIT)
def test_idx_files(app, run, only, on_rank_0, clothes, shared_tmp_path, capsys):
    def make() -> None:
        labels = clothes / "train-labels-idx1-ubyte"
        (clothes / f"{labels.name}.gz").write_bytes(gzip.compress(labels.read_bytes()))
        labels.unlink()
        (shared_tmp_path / "names.txt").write_text("coat\nbag\nboot\n")

    on_rank_0(make)
    options = ["--classes", shared_tmp_path / "names.txt", "--size", 5]
    contents = []
    for ranks in (1, 3):
        out = shared_tmp_path / f"out{ranks}"
        with only(ranks) as is_seen:
            if is_seen:
                run(app.prepare.main, clothes, "--out", out, *options)
        is_root = chainermn.create_communicator().rank == 0
        assert ("train: PNG files: 100%" in capsys.readouterr().out) == is_root
        files = (path for path in out.rglob("*") if path.is_file())
        files = (path for path in files if path.suffix != ".npy")  # times
        contents.append({str(path.relative_to(out)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 30 + 5

    assert contents[0]["classes.txt"] == b"coat\nbag\nboot\n"
    listed = app.data.ImageList.read(out / "train.txt")
    assert [listed[i] for i in (0, 22)] == [("train/0/00000.png", 0), ("train/1/00022.png", 1)]
    raw = (clothes / "train-images-idx3-ubyte").read_bytes()
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(23, 6, 5)
    for i in range(23):
        with Image.open(out / listed[i][0]) as image:
            np.testing.assert_array_equal(image, pixels[i])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "none of val, .*--hold-out 0.1 takes a tenth"),
        ({"val": "ant eater"}, "none of val.txt"),
        ({"hold_out": 1.5}, "between 0 and 1, got 1.5"),
        ({"hold_out": 0.01}, "of so few images is none"),
        ({"hold_out": 0.1, "val": "zebra"}, "either --val or --hold-out"),
        ({"hold_out": 0.1, "train": "lion"}, "contains none of lion"),
        ({"hold_out": 0.1, "train": "zebra/more"}, "no folder for each class"),
    ],
)
def test_error_for_what_is_no_data_set(app, animals, options, message):
    with pytest.raises((OSError, ValueError), match=message):
        app.layouts.find_images(animals, **options)


def test_words_of_parts_are_no_classes(app, tmp_path):
    for name in ("seg_train/a/0.png", "seg_train/b/1.png", "Seg-TEST/a/2.png"):
        write_image(tmp_path / name, 0)
    with pytest.raises(ValueError, match=r"has only Seg-TEST, seg_train, .* --train seg_train"):
        app.layouts.find_images(tmp_path, hold_out=0.5)
    write_image(tmp_path / "seg_train/a/3.png", 0)
    found = app.layouts.find_images(tmp_path, train="seg_train", hold_out=0.5)
    left_out = f"left out: folders beside those of the classes: {tmp_path}/Seg-TEST"
    assert (found.classes, found.notes) == (["a", "b"], [left_out])


def test_parts_of_a_data_set_beside_its_classes(app, tmp_path):
    for name in ("cat/0.png", "cat/1.png", "dog/2.png", "val/cat/3.png", "my_test/dog/4.png"):
        write_image(tmp_path / name, 0)
    message = r"my_test has folders of other classes .dog., .*: move it out of"
    for hold_out in (None, 0.5):
        with pytest.raises(ValueError, match=message):
            app.layouts.find_images(tmp_path, hold_out=hold_out)
    (tmp_path / "my_test/dog").rename(tmp_path / "my_test/small")
    assert app.layouts.find_images(tmp_path).classes == ["cat", "dog", "my_test"]
    with pytest.raises(ValueError, match=r"val has folders of other classes .cat."):
        app.layouts.find_images(tmp_path, hold_out=0.5)


def test_all_folders_are_classes_also_beside_synsets(app, tmp_path):
    for name in ("n01440764/0.png", "n01440764/1.png", "dog/0.png", "dog/1.png", "loose.png"):
        write_image(tmp_path / name, 0)
    for name in ("dog/._0.png", "@eaDir/0.png", "dog/__MACOSX/0.png"):
        write_image(tmp_path / name, 0)
    found = app.layouts.find_images(tmp_path, hold_out=0.5)
    assert found.classes == ["dog", "n01440764"]
    assert found.found.ignored == {".png": [f"{tmp_path}/loose.png"]}
    assert found.found.hidden == 3


def test_classes_that_can_hardly_be_read(app, tmp_path):
    for i in range(11):
        write_image(tmp_path / f"cat/{i}.png", 0)
        write_image(tmp_path / f"dog/{i}.png", 0)
        if i:
            (tmp_path / f"cat/{i}.png").rename(tmp_path / f"cat/{i}.jp2")
    with pytest.raises(
        ValueError, match=r"cat: only 1 of 11 .*10 files .jp2, such as .*cat/1.jp2"
    ):
        app.layouts.find_images(tmp_path, hold_out=0.5)
    assert app.layouts.find_images(tmp_path, hold_out=0.5, as_it_is=True).classes == ["cat", "dog"]
    write_image(tmp_path / "cat/11.png", 0)
    (tmp_path / "cat/1.jp2").unlink()
    assert app.layouts.find_images(tmp_path, hold_out=0.5).classes == ["cat", "dog"]
    with pytest.raises(ValueError, match=r"has one class, dog, .* --as-it-is"):
        (tmp_path / "cat").rename(tmp_path / ".cat")
        app.layouts.find_images(tmp_path, hold_out=0.5)


def test_what_programs_have_written_is_no_class(app, animals):
    message = "--out .*/lists is in .*animals, where each folder is a class"
    with pytest.raises(ValueError, match=message):
        app.layouts.find_images(animals, hold_out=0.5, out=animals / "lists")
    assert app.layouts.find_images(animals, hold_out=0.5, out=animals).notes == []
    write_image(animals / "result/examples.png", 0)
    (animals / "result/run.json").touch()
    with pytest.raises(ValueError, match=r"result seems to be no class .*it has run.json"):
        app.layouts.find_images(animals, hold_out=0.5)


def test_folders_of_classes_that_lie_deeper_are_told(app, tmp_path):
    for name in ("animals/cat/0.png", "animals/dog/1.png", "cars/2.png", "cars/old/3.png"):
        write_image(tmp_path / name, 0)
    assert app.layouts.find_images(tmp_path, hold_out=0.5).notes == [
        "images of animals lie in 2 folders below it, such as animals/cat: all of them are one "
        "class"
    ]


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_links_to_a_file_of_another_class(app, fails, on_rank_0, animals, shared_tmp_path, link):
    def make() -> None:
        link(animals / "ant eater/new.PNG", animals / "zebra/zebra 01.PNG")

    on_rank_0(make)
    error = fails(app.prepare.main, animals, "--hold-out", 0.2, "--out", shared_tmp_path / "out")
    assert "zebra/zebra 01.PNG" in error
    assert "ant eater/new.PNG" in error
    assert "are the same file (one is a link), in two classes" in error


def test_two_folders_that_are_one(app, animals):
    (animals / "zoo").symlink_to("zebra")
    with pytest.raises(ValueError, match=r"zebra and .*zoo are the same folder"):
        app.layouts.find_images(animals, hold_out=0.5)


def test_images_to_validate_with_are_not_trained_with(app, animals):
    (animals / "valid").symlink_to(".")
    with pytest.raises(ValueError, match=r"valid and .*animals are the same folder"):
        app.layouts.find_images(animals)
    (animals / "valid").unlink()
    with pytest.raises(ValueError, match=r"more is in .*zebra, which is a class to train with"):
        app.layouts.find_images(animals, val="zebra/more")


def test_names_of_numbered_folders(app, tmp_path):
    file, folders = tmp_path / "names.txt", ["1", "10", "2"]
    for content, expected in (
        ("2\ttwo\n1\tone\n10\tten\n", ["one", "ten", "two"]),
        ("2 two\n1 1 one\n10\n", ["1 one", "10", "two"]),
        ("2\ttwo\n1 one\n10\tten\n", ["one", "ten", "two"]),
        ("2\ttwo\none\n10\tten\n", "expected a line .* for each folder, got none for 1"),
        ("1\none\n2\n", "expected a line .* for each folder, got none for 10"),
        ("one\nten\ntwo\n", "sorted 1, 10, 2; people count 1, 2, 10"),
        ("1\tone\n1\tone\n10\tten\n", "expected a line .* for each folder, got none for 2"),
        ("one\n\nthree\n", "names.txt:2: expected the name of a class, got a blank line"),
    ):
        file.write_text(content)
        if isinstance(expected, list):
            assert app.prepare.name_classes(folders, file) == expected
            continue
        with pytest.raises(ValueError, match=expected):
            app.prepare.name_classes(folders, file)
    file.write_text("one\ntwo\nten\n")
    assert app.prepare.name_classes(["01", "02", "10"], file) == ["one", "two", "ten"]


def test_names_of_folders_in_another_order(app, tmp_path):
    file, folders = tmp_path / "names.txt", ["big cat", "cow", "dog", "e\u0301lan"]
    file.write_text("dog\nbig cat Lion\n\u00e9lan\tmoose\ncow\n", encoding="utf-8")
    assert app.prepare.name_classes(folders, file) == ["Lion", "cow", "dog", "moose"]


@pytest.mark.mpi(2, timeout=LIMIT)
def test_failed_prepare_leaves_nothing(app, fails, run, on_rank_0, ilsvrc, shared_tmp_path):
    """A validation image that is cut off is found, and left out if that is asked for."""
    broken, out = ilsvrc / "val/ILSVRC2012_val_00000002.JPEG", shared_tmp_path / "new"
    on_rank_0(lambda: broken.write_bytes(broken.read_bytes()[:-50]))
    for options in ([], ["--verify"]):
        assert f"cannot read\n{broken} on " in fails(
            app.prepare.main, ilsvrc, "--out", out, *options
        )
        assert not out.exists()
    run(app.prepare.main, ilsvrc, "--out", out, "--skip-unreadable")
    val = app.data.ImageList.read(out / "val.txt")
    assert [val[i][0] for i in range(3)] == [
        f"val/ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 3, 4)
    ]
    index = app.inspection.read_index(val)
    assert index[:, 0].tolist() == [(ilsvrc / val[i][0]).stat().st_size for i in range(3)]


def test_error_for_a_class_without_images(app, animals):
    (animals / "lion").mkdir()
    with pytest.raises(FileNotFoundError, match="lion contains no image"):
        app.layouts.find_images(animals, hold_out=0.1)


def test_error_for_a_class_that_is_not_trained(app, animals):
    write_image(animals / "val" / "lion" / "0.png", 0)
    with pytest.raises(ValueError, match="lion is none of the classes of the training images"):
        app.layouts.find_images(animals)


def test_links_that_lead_round_in_a_circle(app, animals):
    (animals / "zebra/again").symlink_to("../zebra")
    with pytest.raises(ValueError, match=r"zebra and .*again are the same folder"):
        app.layouts.find_images(animals, hold_out=0.5)


def test_names_that_would_be_two_lines(app, animals, tmp_path):
    file = animals / "cat 0\n/etc/a.png"  # a relative path and an absolute one
    write_image(file, 1)
    args = Namespace(classes=None, out=tmp_path, allow_outside=False)
    found = app.layouts.DataSet(animals, ["x"], [(file, 0)], [(file, 0)])
    with pytest.raises(ValueError, match=r"no list can name 'cat 0\\n/etc/a.png', which has"):
        app.prepare.make_lists(found, args)


def test_classes_of_idx_files_are_the_labels_that_occur(app, clothes, tmp_path):
    labels = [path for path in clothes.iterdir() if "labels" in path.name]
    for path in labels:
        count = path.read_bytes()[4:8]
        n = int.from_bytes(count, "big")
        path.write_bytes(b"\0\0\x08\x01" + count + bytes([2, 10, 9][i % 3] for i in range(n)))
    found = app.idx.write_images(clothes, tmp_path / "out", 0, 1)
    assert found.classes == ["2", "9", "10"]
    assert found.val[:3] == [
        (tmp_path / "out/val" / f"{label}/{i:05}.png", number)
        for i, (label, number) in enumerate([(2, 0), (10, 2), (9, 1)])
    ]
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == ["10", "2", "9"]

    test = clothes / "t10k-labels-idx1-ubyte"
    test.write_bytes(test.read_bytes()[:-2] + bytes([11, 1]))
    message = f"{test}: expected labels of the training images, got 1, 11 too"
    with pytest.raises(ValueError, match=re.escape(message)):
        app.idx.write_images(clothes, tmp_path / "other", 0, 1)
    assert not (tmp_path / "other").exists()


@pytest.mark.mpi(2, timeout=LIMIT)
def test_wrong_input_ends_all_ranks_with_one_line(
    app, fails, on_rank_0, clothes, shared_tmp_path, monkeypatch
):
    def make() -> None:
        Path("two.txt").write_text("coat\nbag\n")
        Path("damaged").mkdir()
        Path("damaged/train-images-idx3-ubyte").write_bytes(b"P5")

    monkeypatch.chdir(shared_tmp_path)
    on_rank_0(make)
    for options, message in (
        (["missing"], "there is no folder missing"),
        (["idx", "--classes", "two.txt"], "two.txt has 2 lines for 3 classes"),
        (["idx", "--out", "two.txt/out"], "Not a directory: 'two.txt"),
        (["damaged"], "expected an IDX file"),
    ):
        assert message in fails(app.prepare.main, *options)
