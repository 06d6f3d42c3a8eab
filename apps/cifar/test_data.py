"""Images: drawn, read from files, split, and augmented at random."""

import gzip
import io
import os
import pickle
import re
import shutil
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from chainer.datasets import TupleDataset
from PIL import Image

from chainermn.testing.traps import Trap

CLASSES = 10


def make_rows(n: int, seed: int, n_labels: int = 1) -> np.ndarray:
    """Return rows of CIFAR's binary version. The last labels cycle through the ten classes."""
    rows = np.random.RandomState(seed).randint(0, 256, (n, n_labels + 3072)).astype(np.uint8)
    rows[:, n_labels - 1] = np.arange(n) % CLASSES
    return rows


def names(n: int = CLASSES) -> str:
    return "\n".join(f"class{k}" for k in range(n)) + "\n\n"


def write_cifar10(folder: Path) -> np.ndarray:
    """Write five files of 20 images to train on and one of 7 to test with; return all rows."""
    folder.mkdir(parents=True)
    files = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    parts = [make_rows(7 if name.startswith("test") else 20, k) for k, name in enumerate(files)]
    for name, rows in zip(files, parts, strict=True):
        (folder / name).write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text(names())
    return np.concatenate(parts)


def as_rows(dataset: TupleDataset) -> list[bytes]:
    return [bytes([label]) + image.tobytes() for image, label in dataset]


def check_cifar10(images, rows: np.ndarray) -> None:
    assert images.classes == [f"class{k}" for k in range(CLASSES)]
    assert (len(images.train), len(images.validation)) == (90, 10)
    assert as_rows(images.test) == [row.tobytes() for row in rows[100:]]
    together = as_rows(images.train) + as_rows(images.validation)
    assert sorted(together) == sorted(row.tobytes() for row in rows[:100])
    image, label = images.train[0]
    assert (image.shape, image.dtype, label.dtype) == ((3, 32, 32), np.uint8, np.int32)


def test_validation_images_are_always_the_same(app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    first, again = (app.data.load("cifar10", tmp_path / "cifar") for _ in range(2))
    assert as_rows(again.validation) == as_rows(first.validation)


def python_2(labels: list[int], data: np.ndarray) -> bytes:
    """Return what Python 2 and NumPy 1 make of a dictionary, as in CIFAR's own files."""
    content = data.tobytes()
    n = len(data).to_bytes(2, "little")
    pieces = [
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03",
        b"U\x06labelsq\x04]q\x05(",
        *(b"K" + bytes([label]) for label in labels),
        b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00",
        b"\x85U\x01b\x87Rq\x09(K\x01M" + n + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01",
        b"\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
        len(content).to_bytes(4, "little") + content,
        b"tbU\tfilenamesq\x0c]q\x0dU\x05a.pngq\x0eau.",
    ]
    return b"".join(pieces)


def to_python(folder: Path, protocol: int) -> None:
    """Make the Python version of the files of the binary version."""
    for path in folder.glob("*.bin"):
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        labels, data = rows[:, 0].tolist(), rows[:, 1:]
        path.unlink()
        fields = {b"batch_label": b"one", b"labels": labels, b"data": data.copy()}
        content = pickle.dumps(fields, protocol) if protocol else python_2(labels, data)
        path.with_suffix("").write_bytes(content)
    classes = (folder / "batches.meta.txt").read_text().split()
    (folder / "batches.meta.txt").unlink()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}, protocol or 2))


def nested(folder: Path) -> Path:
    (folder.parent / ".hidden").mkdir()
    return folder.parent


def packed(folder: Path, mode: str = "w:gz") -> Path:
    path = folder.parent / "cifar.tar.gz"
    with tarfile.open(path, mode) as archive:
        archive.add(folder, "cifar-10-batches")
    return path


def packed_on_a_mac(folder: Path) -> Path:
    path = packed(folder, "w:")
    with tarfile.open(path, "a:") as archive:
        archive.add(folder, "__MACOSX/cifar-10-batches")
    return path


def unpacked_by_a_browser(folder: Path) -> Path:
    return packed(folder, "w:")


@pytest.mark.parametrize("protocol", [None, 0, 2, 4, 5])
@pytest.mark.parametrize("place", [Path, nested, packed, packed_on_a_mac, unpacked_by_a_browser])
def test_binary_and_python_version(app, protocol, place, tmp_path):
    folder = tmp_path / "parent/cifar"
    rows = write_cifar10(folder)
    if protocol is not None:
        to_python(folder, protocol)
    check_cifar10(app.data.load("cifar10", place(folder)), rows)


def write_pngs(folder: Path, rows: np.ndarray, names: list[str]) -> None:
    for i, row in enumerate(rows):
        part = "train" if i < 100 else "test"
        path = folder / part / names[row[0]] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(path)


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_folders_of_images(app, dataset, tmp_path, capsys):
    """Folders sort as text: 10 comes before 2."""
    rows = write_cifar10(tmp_path / "binary")
    classes = ["1", "10", "2", "cat", "fire engine", "x", "y\u2028z", "z", "zebra", "\udcff"]
    inner = [f"{'animal/' * (dataset == 'cifar100')}{name}" for name in classes]
    write_pngs(tmp_path / "cifar", rows, inner)
    (tmp_path / "cifar/train/@eaDir").mkdir()
    (tmp_path / "cifar/train/@eaDir/a.png").touch()
    (tmp_path / "cifar/train/notes.txt").touch()
    images = app.data.load(dataset, tmp_path / "cifar")
    assert images.classes == classes
    assert sorted(as_rows(images.test)) == sorted(row.tobytes() for row in rows[100:])
    together = as_rows(images.train) + as_rows(images.validation)
    assert sorted(together) == sorted(row.tobytes() for row in rows[:100])
    assert "left out: 1 file .txt, such as" in capsys.readouterr().out
    few = app.data.load(dataset, tmp_path / "cifar", 40)
    assert len({label for _, label in few.train}) > 5  # not only the first folders


def other_size(folder: Path) -> None:
    Image.new("RGB", (32, 30)).save(folder / "test/class3/9.png")


def too_deep(folder: Path) -> None:
    (folder / "train/class3/more").mkdir()
    (folder / "train/class3/0.png").rename(folder / "train/class3/more/0.png")


def no_class(folder: Path) -> None:
    shutil.copy(folder / "train/class3/0.png", folder / "train/0.png")


def new_class(folder: Path) -> None:
    (folder / "test/class3").rename(folder / "test/class4")


def one_class(folder: Path) -> None:
    shutil.rmtree(folder / "train/class0")


def empty_class(folder: Path) -> None:
    (folder / "train/class9").mkdir()


def other_format(folder: Path) -> None:
    (folder / "train/class0/0.png").rename(folder / "train/class0/0.jp2")


def hardly_any(folder: Path) -> None:
    for i in range(10):
        (folder / f"train/class3/{i}.jp2").touch()


def same_folder(folder: Path) -> None:
    (folder / "train/class9").symlink_to("class3")


def damaged(folder: Path) -> None:
    path = folder / "train/class0/0.png"
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            other_size,
            r"test/class3/9\.png: expected 32x32 pixels, got 32x30; apps/imagenet takes",
        ),
        (too_deep, r"more/0\.png: expected it in folders as train/CLASS/FILE"),
        (no_class, r"train/0\.png: expected it in folders as train/CLASS/FILE"),
        (new_class, r"test/class4: expected one of the classes in .*train"),
        (one_class, r"train has one class, class3, which would always be right"),
        (empty_class, r"train/class9 contains no image$"),
        (other_format, r"train/class0 contains no image; left out: 1 file \.jp2, such as"),
        (hardly_any, r"train/class3: only 1 of 11 files can be read; left out: 10 files \.jp2"),
        (same_folder, r"train/class3 and .*train/class9 are the same"),
        (damaged, r"train/class0/0\.png: "),
    ],
)
def test_folders_that_are_not_as_expected(spoil, message, app, tmp_path):
    for name in ("train/class0", "train/class3", "test/class0", "test/class3"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    spoil(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        app.data.load("cifar10", tmp_path)


def test_classes_of_the_same_name_in_two_superclasses(app, tmp_path):
    for name in ("train/a/cat", "train/b/cat", "train/b/dog", "test/b/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    with pytest.raises(
        ValueError, match=r"train: expected one folder of a class, got a/cat and b/"
    ):
        app.data.load("cifar100", tmp_path)
    (tmp_path / "train/a/cat").rename(tmp_path / "train/a/cow")
    with pytest.raises(FileNotFoundError, match=r"train/c contains no image$"):
        (tmp_path / "train/c").mkdir()
        app.data.load("cifar100", tmp_path)


def test_two_data_sets_in_one_folder(app, tmp_path):
    for name in ("cifar-10-batches-bin", "cifar-10-batches-py"):
        write_cifar10(tmp_path / name)
    to_python(tmp_path / name, 2)
    places = (
        f"test_batch.bin in {tmp_path}/cifar-10-batches-bin and test_batch in {tmp_path}/cifar"
    )
    with pytest.raises(ValueError, match=f"expected one data set, got {re.escape(places)}"):
        app.data.load("cifar10", tmp_path)


GOOD = {"labels": [0, 1], "data": np.zeros((2, 3072), np.uint8)}
DEEP = b"(t" + b"\x85" * 10_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ValueError: pickle exhausted before seeing STOP"),
        (pickle.dumps(GOOD)[:-1], "ValueError: pickle exhausted before seeing STOP"),
        (pickle.dumps(GOOD, 0), "NotPlainError: the instruction DICT"),
        (pickle.dumps([1]), "NotPlainError: a value of type list"),
        (pickle.dumps({"labels": [0, 1]}), "KeyError: 'data'"),
        (
            pickle.dumps(GOOD | {"labels": [0]}),
            "expected 3072 bytes for each of 1 labels, got uint8 of shape (2, 3072)",
        ),
        (pickle.dumps(GOOD | {"labels": []}), "ValueError: expected integers as labels"),
        (pickle.dumps(GOOD | {"labels": [0, True]}), "ValueError: expected integers as labels"),
        (pickle.dumps(GOOD | {"labels": [0, 10**99]}), "OverflowError"),
        (pickle.dumps(GOOD | {"data": np.zeros((2, 3072))}), "got float64 of shape (2, 30"),
        (pickle.dumps(GOOD | {"data": np.zeros((2, 3, 1024), "u1")}), "uint8 of shape (2, 3, 10"),
        (pickle.dumps(GOOD | {"labels": np.zeros(2)}), "expected integers as labels"),
        (pickle.dumps(GOOD | {"labels": np.zeros((2, 1), int)}), "expected integers as labels"),
        (b"\x80\x02}(" + DEEP + b"K\1u.", "NotPlainError: a value of type tuple in the wr"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "NotPlainError: a value of type nonetype"),
        (b"\x80\x02cos\nsystem\nU\1:\x85R.", "NotPlainError: a call of os.system"),
        (b"\x80\x02.", "ValueError: not enough values to unpack"),
        (b"\x80\x02J.", "ValueError: not enough data in stream to read int4"),
    ],
)
def test_pickles_of_something_else(content, reason, app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    to_python(tmp_path / "cifar", 2)
    path = tmp_path / "cifar/data_batch_2"
    path.write_bytes(content)
    expected = "expected a pickle of a dictionary with data and labels, as of the Python version"
    with pytest.raises(ValueError, match=re.escape(f"{path}: {expected}")) as caught:
        app.data.load("cifar10", path.parent)
    assert reason in str(caught.value)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_that_would_run_a_program_when_unpickled(protocol, app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    to_python(tmp_path / "cifar", 2)
    trapped = tmp_path / "trapped"
    trap = Trap(trapped)
    content = pickle.dumps(GOOD | {"labels": trap, "more": trap}, protocol)
    (tmp_path / "cifar/data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_1: .*: a call of .*mkdir"):
        app.data.load("cifar10", tmp_path / "cifar")
    assert not trapped.exists()
    pickle.loads(content)
    assert trapped.exists()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.dtype(">i4")])
def test_labels_as_an_array(app, protocol, kind, tmp_path):
    rows = write_cifar10(tmp_path / "cifar")
    to_python(tmp_path / "cifar", 2)
    for path in (tmp_path / "cifar").glob("*_batch*"):
        fields = pickle.loads(path.read_bytes(), encoding="bytes")
        fields[b"labels"] = np.array(fields[b"labels"], kind)
        fields[b"data"] = np.asfortranarray(fields[b"data"])
        path.write_bytes(pickle.dumps(fields, protocol))
    check_cifar10(app.data.load("cifar10", tmp_path / "cifar"), rows)


def test_the_first_examples_only(app, tmp_path):
    rows = write_cifar10(tmp_path / "cifar")
    images = app.data.load("cifar10", tmp_path / "cifar", 30)
    together = as_rows(images.train) + as_rows(images.validation)
    assert sorted(together) == sorted(row.tobytes() for row in rows[:30])
    assert len(images.test) == 7


def test_cifar100_has_two_labels_and_the_fine_one_counts(app, tmp_path):
    rows = {name: make_rows(n, n, n_labels=2) for name, n in (("train", 40), ("test", 5))}
    for name, content in rows.items():
        (tmp_path / f"{name}.bin").write_bytes(content.tobytes())
    (tmp_path / "fine_label_names.txt").write_text(names())
    images = app.data.load("cifar100", tmp_path)
    assert as_rows(images.test) == [row[1:].tobytes() for row in rows["test"]]
    assert (len(images.train), len(images.validation)) == (36, 4)


def cut_off(folder: Path) -> None:
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])


def another_class(folder: Path) -> None:
    (folder / "test_batch.bin").write_bytes(bytes([CLASSES]) + bytes(3072))


def labels_from_1(folder: Path) -> None:
    rows = make_rows(20, 0)
    rows[:, 0] += 1
    (folder / "data_batch_2.bin").write_bytes(rows.tobytes())


def blank_line(folder: Path) -> None:
    (folder / "batches.meta.txt").write_text(names().replace("class4\n", "class4\n\n"))


def one_label(folder: Path) -> None:
    for path in folder.glob("*.bin"):
        rows = np.fromfile(path, np.uint8).reshape(-1, 3073)
        rows[:, 0] = 3
        path.write_bytes(rows.tobytes())


def nothing_in_it(folder: Path) -> None:
    (folder / "test_batch.bin").write_bytes(b"")


def one_is_missing(folder: Path) -> None:
    (folder / "data_batch_2.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (cut_off, ValueError, "data_batch_3.bin: expected rows of 3073 bytes, .* got 61459 bytes"),
        (another_class, ValueError, "test_batch.bin: expected labels from 0 to 9 .* got 10 to 10"),
        (labels_from_1, ValueError, "data_batch_2.bin: expected labels .* seem to begin at 1"),
        (
            one_label,
            ValueError,
            "cifar: expected examples of several classes, got 100, all of one",
        ),
        (blank_line, ValueError, "batches.meta.txt:6: expected the name of a class, got a blank"),
        (nothing_in_it, ValueError, "test_batch.bin: expected rows of 3073 bytes, .* got 0 bytes"),
        (one_is_missing, FileNotFoundError, "contains no data_batch_2.bin$"),
    ],
)
def test_damaged_files_are_refused(spoil, error, message, app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    spoil(tmp_path / "cifar")
    with pytest.raises(error, match=message):
        app.data.load("cifar10", tmp_path / "cifar")


def test_damaged_archives_are_refused(app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        archive.add(tmp_path / "cifar", "cifar-10-batches-bin")
    content = whole.getvalue()
    damaged = bytearray(content)
    damaged[5000:5100] = bytes(100)
    for spoilt in (content[: len(content) // 2], bytes(damaged), b"no archive"):
        (tmp_path / "spoilt.tar.gz").write_bytes(spoilt)
        with pytest.raises(ValueError, match=r"spoilt.tar.gz: damaged, or no .tar.gz"):
            app.data.load("cifar10", tmp_path / "spoilt.tar.gz")


def test_archives_that_have_to_be_unpacked(app, tmp_path):
    for name in ("train/a/0.png", "train/b/0.png", "test/a/0.png"):
        (tmp_path / "cifar" / name).parent.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "cifar" / name)
    with pytest.raises(FileNotFoundError, match=r"; unpack it if it has folders of images$"):
        app.data.load("cifar10", packed(tmp_path / "cifar"))
    with pytest.raises(ValueError, match=r"no \.tar\.gz .*: unpack archives of other kinds$"):
        app.data.load("cifar10", packed(tmp_path / "cifar", "w:bz2"))


def test_archive_with_a_header_that_python_reads_slowly(app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    path = tmp_path / "slow.tar.gz"
    with tarfile.open(path, "w:gz", pax_headers={"comment": "1" * 9000}) as archive:
        archive.add(tmp_path / "cifar", "cifar")
    reason = r"damaged, or no \.tar\.gz \(expected at most .* got a header of 9216 bytes\)"
    with pytest.raises(ValueError, match=rf"slow\.tar\.gz: {reason}"):
        app.data.load("cifar10", path)


def test_archive_that_unpacks_to_gigabytes(app, tmp_path, monkeypatch):
    monkeypatch.setattr(app.formats, "MOST_BYTES", 1 << 22)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)) * 128)
    reason = r"more than formats\.MOST_BYTES = 4194304 bytes in it\): unpack archives of other"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"bomb\.tar\.gz: damaged, .* \({reason}"):
            app.data.load("cifar10", path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_links_devices_and_holes_in_an_archive_are_not_read(app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    missing = tmp_path / "cifar/test_batch.bin"
    secret = tmp_path / "secret"
    missing.rename(secret)
    for kind in ("link", "hard link", "device", "hole"):
        with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "cifar", "cifar")
            member = tarfile.TarInfo("cifar/test_batch.bin")
            if kind == "device":
                member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 5
            elif kind == "hole":
                member.type = tarfile.REGTYPE
                member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
            else:
                member.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
                member.linkname = str(secret)
            archive.addfile(member)
        with pytest.raises(FileNotFoundError, match=r"contains no test_batch.bin$"):
            app.data.load("cifar10", tmp_path / "cifar.tar.gz")


def pipe(folder: Path) -> None:
    (folder / "test_batch.bin").unlink()
    os.mkfifo(folder / "test_batch.bin")


def terabytes(folder: Path) -> None:
    os.truncate(folder / "data_batch_5.bin", 1 << 40)


def many_classes(folder: Path) -> None:
    (folder / "batches.meta.txt").write_text("a\n" * 257)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pipe, r"test_batch\.bin: expected a regular file, got a pipe or a device"),
        (terabytes, r"data_batch_5\.bin: expected at most 268435456 bytes, got 1099511627776"),
        (many_classes, r"batches\.meta\.txt: expected 1 to 256 names, got 257"),
    ],
)
def test_files_that_may_do_harm_are_refused(spoil, message, app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    spoil(tmp_path / "cifar")
    with pytest.raises(ValueError, match=message):
        app.data.load("cifar10", tmp_path / "cifar")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("shapes", "folder"), ValueError, "--dataset shapes is drawn, so it takes no --data"),
        (("cifar10",), ValueError, "--dataset cifar10 is read from --data PATH"),
        (("cifar10", "nowhere"), FileNotFoundError, "nowhere"),
        (("shapes", "", 9), ValueError, "--examples must be at least 10, got 9"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message, app, tmp_path):
    with pytest.raises(error, match=re.escape(message)):
        app.data.load(*arguments)


def test_shapes(app):
    images = app.data.load("shapes", examples=200)
    assert (len(images.train), len(images.validation), len(images.test)) == (180, 20, 100)
    together = Counter(int(label) for _, label in [*images.train, *images.validation])
    assert together == dict.fromkeys(range(CLASSES), 20)
    assert len(set(as_rows(images.test)) & set(as_rows(images.train))) == 0
    app.shapes.draw.cache_clear()
    assert as_rows(app.data.load("shapes", examples=200).train) == as_rows(images.train)


def test_images_as_networks_take_them(app):
    images = np.arange(256, dtype=np.uint8).repeat(12).reshape(1, 3, 32, 32)
    ((image, label),) = app.data.normalized(TupleDataset(images, np.int32([7])))
    assert (image.dtype, label) == (np.float32, 7)
    np.testing.assert_allclose(image, images[0] / 127.5 - 1, rtol=1e-6, atol=1e-6)
    assert (image.min(), image.max()) == (-1, 1)


def test_images_are_shifted_and_mirrored_at_random(app):
    original = np.random.RandomState(0).randint(1, 256, (1, 3, 32, 32)).astype(np.uint8)
    dataset = app.data.normalized(TupleDataset(original, np.int32([7])), augment=True)
    framed = np.zeros((3, 40, 40), np.uint8)
    framed[:, 4:36, 4:36] = original[0]
    possible = {}
    for top in range(9):
        for left in range(9):
            cut = framed[:, top : top + 32, left : left + 32]
            possible[cut.tobytes()] = top, left, False
            possible[cut[:, :, ::-1].tobytes()] = top, left, True

    def draw(seed: int) -> list[tuple[int, int, bool]]:
        np.random.seed(seed)
        drawn = [np.rint((dataset[0][0] + 1) * 127.5).astype(np.uint8) for _ in range(1500)]
        return [possible[image.tobytes()] for image in drawn]

    found = draw(1)
    assert set(found) == set(possible.values())
    assert draw(1) == found
    assert draw(2) != found
