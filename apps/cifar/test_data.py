"""Images: drawn, read from files, split, and augmented at random."""

import gzip
import io
import os
import re
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from chainer.datasets import TupleDataset

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
    folder.mkdir()
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


def test_binary_version_in_a_folder(app, tmp_path):
    rows = write_cifar10(tmp_path / "cifar")
    images = app.data.load("cifar10", tmp_path / "cifar")
    check_cifar10(images, rows)
    again = app.data.load("cifar10", tmp_path / "cifar")
    assert as_rows(again.validation) == as_rows(images.validation)


def test_binary_version_in_an_archive(app, tmp_path):
    rows = write_cifar10(tmp_path / "cifar")
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar", "cifar-10-batches-bin")
    check_cifar10(app.data.load("cifar10", tmp_path / "cifar.tar.gz"), rows)


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


def nothing_in_it(folder: Path) -> None:
    (folder / "test_batch.bin").write_bytes(b"")


def python_version(folder: Path) -> None:
    (folder / "data_batch_1.bin").rename(folder / "data_batch_1")


def one_is_missing(folder: Path) -> None:
    (folder / "data_batch_2.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (cut_off, ValueError, "data_batch_3.bin: expected rows of 3073 bytes, .* got 61459 bytes"),
        (another_class, ValueError, "test_batch.bin: expected classes from 0 to 9, got 10"),
        (nothing_in_it, ValueError, "test_batch.bin: expected rows of 3073 bytes, .* got 0 bytes"),
        (python_version, FileNotFoundError, "data_batch_1.bin, but the Python version of CIFAR"),
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


def test_archive_with_a_header_that_python_reads_slowly(app, tmp_path):
    write_cifar10(tmp_path / "cifar")
    path = tmp_path / "slow.tar.gz"
    with tarfile.open(path, "w:gz", pax_headers={"comment": "1" * 9000}) as archive:
        archive.add(tmp_path / "cifar", "cifar")
    reason = r"damaged, or no \.tar\.gz \(expected at most .* got a header of 9216 bytes\)"
    with pytest.raises(ValueError, match=rf"slow\.tar\.gz: {reason}"):
        app.data.load("cifar10", path)


def test_archive_that_unpacks_to_gigabytes(app, tmp_path, monkeypatch):
    monkeypatch.setattr(app.data, "MOST_BYTES", 1 << 22)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(bytes(1 << 24)) * 128)
    reason = r"more than data\.MOST_BYTES = 4194304 bytes in it"
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"bomb\.tar\.gz: damaged, .* \({reason}\)$"):
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


def no_text(folder: Path) -> None:
    (folder / "batches.meta.txt").write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pipe, r"test_batch\.bin: expected a regular file, got a pipe or a device"),
        (terabytes, r"data_batch_5\.bin: expected at most 268435456 bytes, got 1099511627776"),
        (many_classes, r"batches\.meta\.txt: expected 1 to 256 names, got 257"),
        (no_text, r"batches\.meta\.txt: expected UTF-8"),
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
