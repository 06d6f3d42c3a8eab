"""Images from tar files that are read sequentially."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import chainer
import numpy as np
import pytest

import chainermn

N_RANKS = (1, 2, 3)
# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300


@pytest.fixture(scope="module")
def packed(app, run, few, tmp_path_factory) -> Path:
    """Return a folder with the images of ``few`` in shards, packed by all ranks of a test."""
    folder = chainermn.create_communicator().bcast_obj(tmp_path_factory.mktemp("packed"))
    for part, n in (("train", 14), ("val", 31)):
        options = ["--root", few, "--out", folder / part, "--images", n]
        run(app.pack.main, few / f"{part}.txt", *options)
    return folder


@pytest.mark.mpi(3, timeout=LIMIT)
def test_format_is_that_of_webdataset(packed, few):
    listed = [line.split() for line in (few / "train.txt").read_text().splitlines()]
    found = {}
    for path in sorted((packed / "train").glob("*.tar")):
        with tarfile.open(path) as archive:
            names = archive.getnames()
            contents = [archive.extractfile(name).read() for name in names]
        for image, label in zip(names[::2], names[1::2], strict=True):
            assert image == label.replace(".cls", ".jpg")
        labels = [int(content) for content in contents[1::2]]
        # In a list that is sorted by class, too, every shard would have images of all classes.
        numbers = [int(name.removesuffix(".jpg")) for name in names[::2]]
        assert max(numbers) - min(numbers) > len(listed) // 2
        assert numbers != sorted(numbers)
        for name, content, label in zip(names[::2], contents[::2], labels, strict=True):
            found[int(name.removesuffix(".jpg"))] = content, label
    expected = [((few / name).read_bytes(), int(label)) for name, label in listed]
    assert [found[i] for i in range(len(found))] == expected
    for name in ("classes.txt", "mean.json"):
        assert (packed / "train" / name).read_text() == (few / name).read_text()


@pytest.mark.mpi(3, timeout=LIMIT)
def test_packed_by_any_number_of_ranks_or_indexed_again(
    app, run, only, on_rank_0, packed, few, shared_tmp_path, capsys
):
    is_root = chainermn.create_communicator().rank == 0
    one = shared_tmp_path / "one"
    with only(1) as is_seen:
        if is_seen:
            options = ["--root", few, "--out", one, "--images", 14]
            run(app.pack.main, few / "train.txt", *options)
    assert (f"120 images in 9 shards: {one}\n" in capsys.readouterr().out) == is_root
    names = sorted(path.name for path in (packed / "train").iterdir())
    assert sorted(path.name for path in one.iterdir()) == names
    for name in names:
        assert (one / name).read_bytes() == (packed / "train" / name).read_bytes()
    index = one / "index.json"
    before = index.read_text()
    on_rank_0(index.unlink)
    with only(2) as is_seen:
        if is_seen:
            run(app.pack.main, one)
    assert index.read_text() == before


# Coverage and order


@pytest.fixture
def numbered(app, tmp_path) -> tuple[Path, int]:
    """Return a folder of shards with 7, 1 and 12 images, each just its number, and the total."""
    number = 0
    rows = []
    for i, count in enumerate((7, 1, 12)):
        files = []
        for _ in range(count):
            file = tmp_path / f"{number}.png"
            file.write_bytes(str(number).encode())
            files.append((f"a/{number}", file, number % 4))
            number += 1
        app.shards.write_shard(tmp_path / f"{i}.tar", files)
        rows.append(app.shards.describe_shard(tmp_path / f"{i}.tar"))
    (tmp_path / "index.json").write_text(json.dumps(rows))
    return tmp_path, number


def make(file: io.BytesIO, name: str, label: int, number: int) -> tuple[int, int]:
    own = int(file.read())
    assert label == own % 4
    assert name.endswith(f".tar/a/{own}.png")
    return own, number


def iterate(app, folder, rank, size, batch_size=3, seed=5, **options):
    shards = app.shards.Shards.read(folder)
    order = app.shard_iterator.ShardOrder(shards.counts, rank, size, seed)
    return app.shard_iterator.ShardIterator(shards, order, batch_size, make, 2, **options)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_what_cannot_be_read_is_not_packed(app, run, fails, on_rank_0, few, shared_tmp_path):
    root, out = shared_tmp_path / "few", shared_tmp_path / "shards"
    victim = root / "val/circle-00010.jpg"

    def make() -> None:
        shutil.copytree(few, root)
        victim.write_bytes(victim.read_bytes()[:-100])
        (root / "val.txt.sizes.npy").unlink()
        lines = (root / "val.txt").read_text().splitlines()
        labels = (f"{line[:-1]}{int(line[-1]) + 1}\n" for line in lines)
        (root / "from_1.txt").write_text("".join(labels))

    on_rank_0(make)
    options = [root / "val.txt", "--root", root, "--out", out]
    assert f"cannot read {victim} ({root}/val.txt:11)" in fails(app.pack.main, *options)
    assert not out.exists()
    run(app.pack.main, *options, "--skip-unreadable")
    shards = app.shards.Shards.read(out)
    assert (len(shards), shards.labels) == (30, [0, 9])
    message = "expected labels from 0 to 9 for 10 names, got 1 to 10: they seem to begin at 1"
    assert message in fails(app.pack.main, root / "from_1.txt", *options[1:])
    on_rank_0((root / "classes.txt").unlink)
    run(app.pack.main, root / "from_1.txt", *options[1:], "--skip-unreadable")
    assert app.shards.Shards.read(out).labels == [1, 10]
    given = [out, out, "--classes", few / "classes.txt", "--arch", "small"]
    assert message in fails(app.train.main, *given, "--out", shared_tmp_path / "result")


@pytest.mark.parametrize("window", [4, 1000])
@pytest.mark.parametrize("size", N_RANKS)
def test_every_image_once_in_each_epoch(app, numbered, size, window, monkeypatch):
    monkeypatch.setattr(app.shard_iterator, "WINDOW", window)
    folder, n = numbered
    iterators = [iterate(app, folder, rank, size) for rank in range(size)]
    ends, taken = [], []
    for iterator in iterators:
        ends.append([])
        while iterator.epoch < 3:
            taken += next(iterator)
            ends[-1].append((iterator.is_new_epoch, iterator.epoch_detail))
        iterator.finalize()
    assert ends == [ends[0]] * size  # so that no rank waits for others at the end of an epoch
    assert all(number % n == own for own, number in taken)
    by_epoch = Counter(number for _, number in taken if number < 3 * n)
    assert by_epoch == Counter(range(3 * n))


@pytest.mark.parametrize("size", N_RANKS)
def test_validation_is_in_order_and_ends(app, numbered, size):
    folder, n = numbered
    taken = []
    for rank in range(size):
        iterator = iterate(app, folder, rank, size, seed=None, repeat=False)
        for _ in range(2):
            found = [own for batch in iterator for own, _ in batch]
            iterator.reset()
        taken += found
        iterator.finalize()
    assert taken == list(range(n))


def test_order_is_shuffled_but_read_in_sequence(app, monkeypatch):
    monkeypatch.setattr(app.shard_iterator, "WINDOW", 20)
    counts = [50, 30, 40, 80]
    shard_of = np.repeat(np.arange(4), counts)
    orders, sequences = [], []
    for epoch in range(3):
        sequences.append([])
        for rank in range(2):
            order = app.shard_iterator.ShardOrder(counts, rank, 2, seed=1)
            read, places = order.plan(epoch)
            changes = shard_of[read][1:] != shard_of[read][:-1]
            assert (np.diff(read)[~changes] == 1).all()
            assert changes.sum() < 4
            sequences[-1] += shard_of[read].tolist()
            delays = places - np.arange(len(read))
            assert 1 < np.abs(delays).max() < 20
            np.testing.assert_array_equal(order.order(epoch), read[places])
            orders.append(order.order(epoch).tolist())
    assert len({tuple(order) for order in orders}) == 6
    assert len({tuple(dict.fromkeys(sequence)) for sequence in sequences}) == 3
    again = app.shard_iterator.ShardOrder(counts, 1, 2, seed=1).order(2)
    assert again.tolist() == orders[-1]
    other = app.shard_iterator.ShardOrder(counts, 1, 2, seed=2).order(2)
    assert other.tolist() != orders[-1]


@pytest.mark.parametrize("stop", [1, 4, 5, 11])
@pytest.mark.parametrize("size", [1, 3])
def test_resumed_anywhere_it_is_as_if_undisturbed(app, numbered, stop, size, monkeypatch):
    monkeypatch.setattr(app.shard_iterator, "WINDOW", 4)
    folder, _ = numbered
    unbroken, resumed = (iterate(app, folder, size - 1, size) for _ in range(2))
    for _ in range(stop):
        next(unbroken)
    next(resumed)
    saved = chainer.serializers.DictionarySerializer()
    unbroken.serialize(saved)
    resumed.serialize(chainer.serializers.NpzDeserializer(saved.target))
    assert resumed.previous_epoch_detail == unbroken.previous_epoch_detail
    for _ in range(10):
        assert next(resumed) == next(unbroken)
        assert resumed.epoch_detail == unbroken.epoch_detail
    unbroken.finalize()
    resumed.finalize()


def test_batch_of_one_image_would_be_empty(app, numbered):
    with pytest.raises(ValueError, match="20 images in shards for 3 ranks: batches must have"):
        iterate(app, numbered[0], 0, 3, batch_size=1)
    iterate(app, numbered[0], 0, 2, batch_size=1).finalize()


# Damage


def damage(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize(
    ("position", "content", "message"),
    [
        (0, b"#", "ReadError: bad checksum"),
        (3 * 2048, b"#", "ReadError: damaged header before byte 6656"),
        (2048 + 1536, b"x", "ValueError: invalid literal for int"),
    ],
)
def test_damaged_shard_is_named(app, numbered, position, content, message):
    path = numbered[0] / "2.tar"
    damage(path, position, content)
    iterator = iterate(app, numbered[0], 0, 1)
    start = rf"shard {path} on {socket.gethostname()} is damaged, or not in webdataset's format "
    with pytest.raises(SystemExit, match=rf"error: {start}\({message}"):
        for _ in range(7):
            next(iterator)
    iterator.finalize()


def test_image_without_a_class(app, tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(OSError, match=r"a\.tar on .* is damaged, .*KeyError: 'cls'"):
        app.shards.describe_shard(path)


ROW = {"name": "a.tar", "images": 3, "bytes": 10240, "classes": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("[]", "names no shard"),
        ("{}", "expected a list, got {}"),
        ('[{"name": "a"}]', "[0]: 'images' is missing"),
        ([ROW | {"name": "../a.tar"}], "expected names of files in this folder, got '../a.tar'"),
        ([ROW | {"name": "/a.tar"}], "expected names of files in this folder, got '/a.tar'"),
        ([ROW | {"name": ".."}], "expected names of files in this folder, got '..'"),
        ([ROW | {"classes": 10**12}], "[0]: 'classes': expected an integer from 1 to 100000, got"),
        ([ROW, ROW | {"images": -1}], "[1]: 'images': expected an integer from 1"),
        ([ROW | {"images": 10**9}], "1000000000 images in the 10240 bytes of a.tar"),
    ],
)
def test_error_for_what_is_no_index(app, content, message, tmp_path):
    content = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(
        FileNotFoundError, match=r"index\.json is missing: pack\.py .* prepare\.py makes"
    ):
        app.shards.Shards.read(tmp_path)
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=rf"index\.json(: )?{re.escape(message)}"):
        app.shards.Shards.read(tmp_path)


def test_only_images_of_the_folder_are_packed(app, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root").mkdir()
    link = tmp_path / "root/a.jpg"
    link.symlink_to("../secret")
    for file in (link, tmp_path / "root/../secret"):
        with pytest.raises(ValueError, match=r"it leads out of .*root; --allow-outside"):
            app.shards.write_shard(tmp_path / "a.tar", [("0", file, 0)], tmp_path / "root")
    app.shards.write_shard(tmp_path / "a.tar", [("0", link, 0)])
    ((content, *_),) = app.shards.read_shard(tmp_path / "a.tar", [0])
    assert content == b"secret"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (b"4", "ValueError: expected a class below 4, got 4"),
        (b"-1", "ValueError: expected a class below 4, got -1"),
        (b"1" * 21, "ValueError: a.cls has 21 bytes, at most 20 are expected"),
    ],
)
def test_class_that_no_network_has(app, tmp_path, label, message):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("a.jpg", b"image"), ("a.cls", label)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(OSError, match=rf"a\.tar on .* \({message}\)"):
        list(app.shards.read_shard(tmp_path / "a.tar", [0], 4))


def test_sparse_file_in_a_shard(app, tmp_path):
    (tmp_path / "a.jpg").touch()
    os.truncate(tmp_path / "a.jpg", 1 << 40)  # a hole, which takes no space
    (tmp_path / "a.cls").write_text("0")
    command = ["tar", "-cSf", "a.tar", "a.jpg", "a.cls"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "a.tar").stat().st_size < 100_000
    reason = "a.jpg has 1099511627776 bytes, at most 800000000 are expected"
    with pytest.raises(OSError, match=reason):
        app.shards.describe_shard(tmp_path / "a.tar")


def test_header_that_python_reads_slowly(app, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", pax_headers={"comment": "1" * 9000}) as archive:
        for name in ("a.jpg", "a.cls"):
            archive.addfile(tarfile.TarInfo(name))
    for read in (app.shards.describe_shard, lambda path: list(app.shards.read_shard(path, [0]))):
        with pytest.raises(OSError, match=r"a\.tar.* got a header of 9216 bytes"):
            read(tmp_path / "a.tar")


# Training

SHORT = ["--arch", "small", "--epoch", "2", "--batchsize", "8", "--checkpoint", "4"]


@pytest.fixture(scope="module")
def trained(app, run, packed, tmp_path_factory) -> Path:
    out = chainermn.create_communicator().bcast_obj(tmp_path_factory.mktemp("trained") / "result")
    options = [*SHORT, "--loaderjob", "1", "--out", out]
    run(app.train.main, packed / "train", packed / "val", *options)
    return out


def read_arrays(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / "model.npz") as arrays:
        return dict(arrays)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_learns_and_validates_exactly(app, trained, few):
    log = json.loads((trained / "log").read_text())
    assert [(row["epoch"], row["iteration"]) for row in log] == [(1, 8), (2, 15)]
    assert log[1]["main/loss"] < log[0]["main/loss"]
    about = json.loads((trained / "model.json").read_text())
    assert about["classes"][4] == "star"
    # One process computes the same on the files.
    images = app.data.Images(app.data.ImageList.read(few / "val.txt"), few, 48)
    pixels, digits = (np.stack(part) for part in zip(*images[:], strict=True))
    shares = app.trained.load(trained / "model.npz").shares(pixels)
    accuracy = np.mean(shares.argmax(axis=1) == digits)
    assert log[1]["validation/main/accuracy"] == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_stopped_and_started_again_is_as_if_undisturbed(
    app, run, stop, trained, packed, shared_tmp_path, capsys
):
    options = [packed / "train", packed / "val", *SHORT, "--out", shared_tmp_path]
    stop(14, app.train.main, *options, "--loaderjob", "1")
    capsys.readouterr()
    run(app.train.main, *options, "--loaderjob", "3")
    is_resumed = "resuming after iteration 12, epoch 1, from " in capsys.readouterr().out
    assert is_resumed == (chainermn.create_communicator().rank == 0)
    resumed, undisturbed = read_arrays(shared_tmp_path), read_arrays(trained)
    for name in undisturbed:
        np.testing.assert_array_equal(resumed[name], undisturbed[name], err_msg=name)


@pytest.mark.mpi(3, timeout=LIMIT)
def test_finished_run_goes_on_with_another_number_of_ranks(
    app, run, only, packed, shared_tmp_path
):
    options = [packed / "train", packed / "val", *SHORT, "--out", shared_tmp_path]
    with only(2) as is_seen:
        if is_seen:
            run(app.train.main, *options, "--epoch", "1")
    run(app.train.main, *options, "--epoch", "2")
    log = json.loads((shared_tmp_path / "log").read_text())
    assert [row["iteration"] for row in log] == [8, 13]


@pytest.mark.mpi(2, timeout=LIMIT)
def test_shard_that_is_cut_off_ends_all_ranks_with_one_line(
    app, fails, on_rank_0, packed, shared_tmp_path
):
    path = shared_tmp_path / "packed/train/000003.tar"
    n = (packed / "train/000003.tar").stat().st_size

    def make() -> None:
        shutil.copytree(packed, shared_tmp_path / "packed")
        os.truncate(path, n - 1000)

    on_rank_0(make)
    options = [path.parent, packed / "val", *SHORT, "--out", shared_tmp_path / "result"]
    message = f"shard {path} has {n - 1000} bytes instead of {n} on "
    assert message in fails(app.train.main, *options)


@pytest.mark.mpi(1, timeout=LIMIT)
def test_shard_with_damage_within_ends_the_job_with_one_line(app, fails, packed, tmp_path):
    for part in ("train", "val"):
        folder = shutil.copytree(packed, tmp_path / part / "packed")
        path = folder / part / "000000.tar"
        damage(path, 0, b"#")
        options = [folder / "train", folder / "val", *SHORT, "--out", tmp_path / part / "result"]
        line = fails(app.train.main, *options)
        assert line.startswith(f"error: shard {path} on {socket.gethostname()} is damaged")
