"""How image files become examples."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from PIL import Image

import chainermn
from chainermn.datasets import DistributedOrderSampler

HERE = Path(__file__).resolve().parent
RED, GREEN, BLUE, WHITE = (220, 20, 30), (20, 200, 30), (20, 30, 210), (255, 255, 255)


@pytest.fixture(scope="module")
def drawn(app, tmp_path_factory) -> Path:
    """Return a folder with 60 images to train on and 10 to validate with."""
    root = tmp_path_factory.mktemp("data") / "drawn"
    app.generated.create(root, 60, 10)
    return root


@pytest.fixture
def quarters() -> Image.Image:
    """Return a picture with a red and a green quarter above a blue and a white one."""
    image = Image.new("RGB", (80, 60))
    for i, color in enumerate((RED, GREEN, BLUE, WHITE)):
        image.paste(color, (i % 2 * 40, i // 2 * 30, i % 2 * 40 + 40, i // 2 * 30 + 30))
    return image


def read(app, path, size=40, share=1):
    return app.images.read_image(path, size, partial(app.images.center_box, share=share))


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    _, height, width = pixels.shape
    places = [(y, x) for y in (5, height - 6) for x in (5, width - 6)]
    return [tuple(pixels[:, y, x].astype(int)) for y, x in places]


def assert_alike(found, expected, tolerance=12):
    np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("pixels", [(80, 60), (800, 600)])
def test_photographs_are_turned_upright(app, quarters, orientation, pixels, tmp_path):
    turns = [
        None,
        Image.Transpose.FLIP_LEFT_RIGHT,
        Image.Transpose.ROTATE_180,
        Image.Transpose.FLIP_TOP_BOTTOM,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_270,
    ]
    image, turn = quarters.resize(pixels, Image.Resampling.NEAREST), turns[orientation - 1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = image if turn is None else image.transpose(turn)
    stored.save(tmp_path / "a.jpg", quality=95, exif=exif)
    assert_alike(corners(read(app, tmp_path / "a.jpg")), [RED, GREEN, BLUE, WHITE])


def test_boxes(app):
    assert app.images.center_box(80, 60, 1) == (10, 0, 70, 60)
    assert app.images.center_box(80, 60, 0.5) == (25, 15, 55, 45)
    random = np.random.default_rng(0)
    boxes = np.array([app.images.random_box(80, 60, random, 0.08) for _ in range(1000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, ratio = width * height / 4800, width / height
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 80 and boxes[:, 3].max() <= 60
    assert 0.08 <= share.min() < 0.1 and 0.9 < share.max() <= 1
    assert ratio.min() >= 0.749 and ratio.max() <= 1.334
    assert app.images.random_box(10, 1000, random, 0.5) == (0, 495, 10, 505)


def test_decoding_at_reduced_size_changes_little(app, tmp_path):
    y, x = np.mgrid[:512, :640]
    waves = np.stack([127 + 120 * np.sin(x / 40), 127 + 120 * np.cos(y / 50), x * 0.3], -1)
    Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "a.jpg", quality=95)
    Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "a.png")
    choose = partial(app.images.center_box, share=0.9)
    small, whole = (app.images.read_image(tmp_path / f"a.{e}", 64, choose) for e in ("jpg", "png"))
    assert np.abs(small.astype(int) - whole).mean() < 3


def claims(path: Path, side: int) -> Path:
    """Write and return a small file that claims to have ``side`` x ``side`` pixels."""
    name, sides = path.suffix[1:], side.to_bytes(2, "big") * 2
    written = io.BytesIO()
    Image.new("L", (64, 64)).save(written, {"jpg": "JPEG", "tif": "TIFF"}.get(name, name))
    content = bytearray(written.getvalue())
    if name == "png":
        header = b"IHDR" + side.to_bytes(4, "big") * 2 + content[24:29]
        content[12:33] = header + zlib.crc32(header).to_bytes(4, "big")
    elif name == "jpg":
        place = content.index(b"\xff\xc0") + 5
        content[place : place + 4] = sides
    elif name == "gif":
        content[6:10] = side.to_bytes(2, "little") * 2
    elif name == "webp":
        place = content.index(b"\x9d\x01\x2a") + 3
        content[place : place + 4] = min(side, 16383).to_bytes(2, "little") * 2
    elif name == "bmp":
        content[18:26] = side.to_bytes(4, "little") * 2
    elif name == "ppm":
        content = b"P6 %d %d 255\n" % (side, side)
    elif name == "tif":
        for tag in (256, 257):
            place = content.index(tag.to_bytes(2, "little") + b"\x04\0") + 8
            content[place : place + 4] = side.to_bytes(4, "little")
    path.write_bytes(content)
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum


READ_IMAGES = """
import resource, sys
from functools import partial
sys.path.insert(0, sys.argv[1])
import images

images.Image.preinit()
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[3:]:
    try:
        images.read_image(path, 32, partial(images.center_box, share=1))
    except Exception as error:
        print(type(error).__name__, error)
"""


def read_images(most_memory: int, *paths: Path) -> str:
    """Read images in ``most_memory`` bytes of address space; return the errors."""
    command = [sys.executable, "-c", READ_IMAGES, HERE, str(most_memory), *paths]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_images_that_would_take_gigabytes(tmp_path):
    transparent = tmp_path / "transparent.png"  # which is read
    Image.new("RGBA", (6000, 4000), (*RED, 100)).save(transparent, compress_level=1)
    endings = ["png", "jpg", "gif", "webp", "bmp", "ppm", "tif"]
    paths = [claims(tmp_path / f"a.{ending}", 40000) for ending in endings]
    comment = zlib.compress(bytes(1 << 27), 1)
    text = tmp_path / "text.png"
    Image.new("L", (9, 9)).save(text)
    content = text.read_bytes()
    text.write_bytes(content[:33] + chunk(b"zTXt", b"Comment\0\0" + comment) + content[33:])
    hole = tmp_path / "hole.webp"
    hole.write_bytes(paths[3].read_bytes())
    os.truncate(hole, 1 << 40)
    errors = read_images(1 << 29, transparent, *paths, text, hole)
    *too_large, of_text, of_hole = errors.splitlines()
    assert len(too_large) == len(paths)
    for line in too_large:
        reason = "pixels) exceeds limit of 100000000 pixels"
        assert line.startswith("DecompressionBombError Image size (") and reason in line
    assert of_text == "ValueError Decompressed data too large for PngImagePlugin.MAX_TEXT_CHUNK"
    assert of_hole == (f"ValueError {hole}: expected at most 800000000 bytes, got {1 << 40}")


def test_as_many_pixels_as_can_be_are_read(app, monkeypatch, tmp_path):
    monkeypatch.setattr(app.images.Image, "MAX_IMAGE_PIXELS", 2400 // 2)
    Image.new("RGB", (60, 40), RED).save(tmp_path / "a.png")
    Image.new("RGB", (60, 41), RED).save(tmp_path / "b.png")
    with pytest.warns(Image.DecompressionBombWarning):
        assert (read(app, tmp_path / "a.png")[0] == 220).all()
    with pytest.raises(Image.DecompressionBombError, match=r"2460 pixels\) exceeds limit of 2400"):
        read(app, tmp_path / "b.png")


def test_list_file(app, tmp_path):
    path = tmp_path / "list.txt"
    lines = "a/b.jpg 3\nname with spaces.jpg 0\nü.jpg\t7\n".replace("\t", " ")
    path.write_bytes(lines.encode())  # file names are bytes
    listed = app.data.ImageList.read(path)
    expected = [("a/b.jpg", 3), ("name with spaces.jpg", 0), (os.fsdecode("ü.jpg".encode()), 7)]
    assert [listed[i] for i in range(len(listed))] == expected
    assert [listed.take([1, 2])[i] for i in range(2)] == expected[1:]
    assert [listed.without({0})[i] for i in range(2)] == expected[1:]
    assert listed.without({}) is listed
    with pytest.raises(OSError, match=r"list.txt: none of its images can be read"):
        listed.without({0, 1, 2})


NAMES = [b" a.jpg", b"\xe3\x80\x80b.jpg", b"c\xe2\x80\xa8\x0b\x1c\r.jpg", b"caf\xe9/d e.jpg"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("separator", [b" ", b"\t", b" \t  "])
def test_names_in_lists_survive(app, separator, end, mark, tmp_path):
    lines = (name + separator + b"%d" % i for i, name in enumerate(NAMES))
    (tmp_path / "list.txt").write_bytes(mark + end.join(lines))
    listed = app.data.ImageList.read(tmp_path / "list.txt")
    assert [listed[i] for i in range(4)] == [(os.fsdecode(n), i) for i, n in enumerate(NAMES)]


def test_images_that_are_listed_twice(app, tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("a/x.jpg 1\nb.jpg 0\n./a//x.jpg 1\na/x.jpg 1\n/a/x.jpg 0\n")
    second.write_text("c.jpg 0\n./b.jpg 0\n")
    train, val = (app.data.ImageList.read(path) for path in (first, second))
    assert (train.repeated, val.repeated, train.count_shared(val)) == (2, 0, 1)
    assert train.take([0, 2, 4]).repeated == 1
    second.write_text("c.jpg 0\n./b.jpg 2\n")
    with pytest.raises(ValueError, match=f"^{first}:2: 'b.jpg' has label 0 .* 2 in {second}:2"):
        train.count_shared(app.data.ImageList.read(second))
    first.write_text(f"a.jpg 1\n{tmp_path}/link/../b.jpg 1\n")
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root/c")
    second.write_text(f"root/../a.jpg 1\nb.jpg 1\n{tmp_path}/c.jpg 1\n")
    train, val = (app.data.ImageList.read(path) for path in (first, second))
    for root in (tmp_path / "root", tmp_path / "root/../root"):
        assert val.count_shared(train, root) == 2
    assert train.count_shared(app.data.ImageList([f"{tmp_path}/a.jpg"], [1]), tmp_path) == 1
    second.write_text("a.jpg 1\nb.jpg 1\n.//a.jpg 2\n")
    with pytest.raises(ValueError, match=f"^{second}:3: 'a.jpg' has label 2 .* 1 in {second}:1"):
        app.data.ImageList.read(second)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no image"),
        ("a.jpg 1\nb.jpg\n", "list.txt:2: expected 'path label', got b'b.jpg"),
        ("a.jpg -1\n", "list.txt:1"),
        ("a.jpg 1\n\n", "list.txt:2"),
        ("a\0.jpg 1\n", "list.txt:1: expected 'path label', got b'a.x00.jpg 1.*iconv -f UTF-16"),
        ("a.jpg 100000\n", "list.txt:1: expected a class less than .* 100000, got 100000"),
        (f"a.jpg {'9' * 4190}\n", "list.txt:1: expected a class less than .* 100000, got 9"),
        (f"b.jpg 1\n{'a' * 4200} 1\n", "list.txt:2: expected a line of at most 4200 bytes"),
    ],
)
def test_error_for_what_is_no_list(app, content, message, tmp_path):
    (tmp_path / "list.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        app.data.ImageList.read(tmp_path / "list.txt")


@pytest.fixture
def root(tmp_path) -> Path:
    """Return a folder with an image, a pipe, and links, some of which lead out of it."""
    for name in ("root/a/x.png", "outside/y.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        Image.new("RGB", (30, 30), RED).save(path)
    (tmp_path / "root/link").symlink_to("../outside")
    (tmp_path / "root/inner").symlink_to("a")
    (tmp_path / "root/a/link.png").symlink_to(tmp_path / "outside/y.png")
    os.mkfifo(tmp_path / "root/a/pipe.png")
    return tmp_path / "root"


@pytest.mark.parametrize(
    "path", ["../outside/y.png", "a/../../outside/y.png", "{root}/../outside/y.png", "link/y.png"]
)
def test_list_must_not_lead_out_of_the_root(app, root, path, tmp_path):
    path = path.format(root=root)
    source = tmp_path / "list.txt"
    source.write_text(f"a/x.png 1\n{path} 2\n")
    with pytest.raises(ValueError) as caught:
        app.data.ImageList.read(source, root)
    assert str(caught.value) == (
        f"{source}:2: {path!r} leads out of {root}; --allow-outside takes paths and links that do"
    )
    listed = app.data.ImageList.read(source)
    assert listed[1] == (path, 2)
    assert app.data.Images(listed, root, 24)[1][1] == 2


def test_list_may_lead_round_within_the_root(app, root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    lines = f"a/../a/x.png 2\n{root}/a/x.png 2\ninner/x.png 2\n{tmp_path}/alias/a/x.png 2\n"
    source = tmp_path / "list.txt"
    source.write_text(lines)
    for name in ("root", "alias"):
        listed = app.data.ImageList.read(source, tmp_path / name)
        images = app.data.Images(listed, tmp_path / name, 24)[:]
        assert [label for _, label in images] == [2] * 4
    source.write_text(f"{lines}{tmp_path}/alias/inner/x.png 3\n")
    with pytest.raises(
        ValueError, match=f"^{source}:5: 'a/x.png' has label 3 here, and 2 in .*:1"
    ):
        app.data.ImageList.read(source, root)


def test_files_that_are_links_or_pipes(app, root, tmp_path):
    source = tmp_path / "list.txt"
    source.write_text("a/x.png 0\na/link.png 1\na/pipe.png 2\n")
    listed = app.data.ImageList.read(source, root)
    for part, first in ((listed, 0), (listed.take([1, 2]), 1)):
        link, pipe = app.data.Images(part, root, 24)[1 - first : 3 - first]
        assert link.path == f"{root}/a/link.png ({source}:2)"
        assert link.reason.startswith(f"ValueError: it leads out of {root}; --allow-outside")
        assert pipe.path == f"{root}/a/pipe.png ({source}:3)"
        assert "expected a regular file, got a pipe or a device" in pipe.reason
    free = app.data.Images(app.data.ImageList.read(source), root, 24)
    assert free[1][1] == 1


@pytest.fixture
def inspect(app, drawn, tmp_path):
    """Return a function that inspects a copy of images, and the folder."""
    root = tmp_path / "copy"
    shutil.copytree(drawn, root)
    comm = chainermn.create_communicator("naive")

    def call(skip: bool = False, look=app.images.check_header):
        lists = [app.data.ImageList.read(root / f"{part}.txt") for part in ("train", "val")]
        looks = [(listed, look) for listed in lists]
        found = app.inspection.Inspection(looks, root, comm, skip)
        return found.settle()

    return call, root


@pytest.mark.mpi(1)
def test_files_are_compared_with_what_prepare_saw(app, inspect, capsys):
    call, root = inspect
    victim, other = root / "val/star-00004.jpg", root / "val/ring-00006.jpg"
    status = victim.stat()
    # What is not looked at again, as size and time are the same, may be anything.
    victim.write_bytes(bytes(status.st_size))
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(other, ns=(1, 1))
    looked_at = []
    train, val = call(look=lambda path, root: looked_at.append(path))
    assert (len(train), len(val), looked_at) == (60, 10, [str(other)])
    os.utime(victim, ns=(1, 1))
    with pytest.raises(
        OSError, match=f"^cannot read {victim} .{root}/val.txt:5. .*expected a pic"
    ):
        call()
    victim.write_bytes(b"")
    changed = f"{victim} \\({root}/val.txt:5\\) has changed since prepare.py looked at it"
    with pytest.raises(
        OSError, match=rf"^{changed}: {status.st_size} bytes then, 0 now.*\nIf .* again"
    ):
        call()
    victim.unlink()
    other.unlink()
    with pytest.raises(OSError, match=rf"^{changed}: host .* has no such file") as caught:
        call()
    remedies = [app.inspection.EVERYWHERE, app.inspection.AGAIN]
    assert str(caught.value).splitlines()[2:4] == remedies
    capsys.readouterr()
    train, val = call(skip=True)
    assert (len(train), len(val)) == (60, 8)
    assert [val.where(i) for i in (3, 4)] == [f"{root}/val.txt:4", f"{root}/val.txt:6"]
    told = capsys.readouterr().out.splitlines()
    assert [line.startswith("skipped: ") for line in told] == [True, True]


@pytest.mark.mpi(1)
@pytest.mark.parametrize("change", ["absent", "other list", "damaged"])
def test_headers_are_read_without_an_index_of_the_list(app, inspect, change):
    call, root = inspect
    victim, status = root / "val/star-00004.jpg", (root / "val/star-00004.jpg").stat()
    victim.write_bytes(bytes(status.st_size))
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    index = app.inspection.index_path(root / "val.txt")
    if change == "absent":
        index.unlink()
    elif change == "damaged":
        index.write_bytes(index.read_bytes()[:100])
    else:
        text = (root / "val.txt").read_text()
        (root / "val.txt").write_text(text.replace("star-00004.jpg 4", "star-00004.jpg 5"))
    with pytest.raises(OSError, match=f"^cannot read {victim} "):
        call()


@pytest.mark.mpi(1)
def test_slow_inspection_ends_the_job_before_it_validates(app, inspect):
    _, root = inspect
    go_on = threading.Event()

    def look(path: str, root: Path | None) -> None:
        go_on.wait(60)
        raise OSError("no image")

    comm = chainermn.create_communicator("naive")
    app.inspection.index_path(root / "val.txt").unlink()
    lists = [app.data.ImageList.read(root / "val.txt")]
    found = app.inspection.Inspection([(lists[0], look)], root, comm)
    assert found.settle(0) == lists
    trainer = SimpleNamespace(updater=SimpleNamespace(is_new_epoch=False))
    assert found.trigger(trainer)
    found(trainer)
    go_on.set()
    trainer.updater.is_new_epoch = True
    with pytest.raises(SystemExit, match=r"error: cannot read .*no image"):
        found(trainer)


def test_constant_color_has_deviation_1(app):
    sums = app.data.Sums()
    sums.add(np.stack([np.full((4, 5), 7), np.eye(4, 5), np.eye(4, 5)]).astype(np.uint8))
    assert sums.statistics()["deviation"] == [1, 0.4, 0.4]


def test_classes_without_images_to_validate_with_are_said_in_15_lines(
    app, drawn, tmp_path, capsys
):
    train, val = (app.data.ImageList.read(drawn / f"{part}.txt") for part in ("train", "val"))
    names, images = [*map(str, range(10))], app.data.Images(train, drawn, 24)
    app.reports.show_images(tmp_path, names, train, val.take(range(8)), images, ["left out: a"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["left out: a", "2 classes have no image to validate with, such as 8 8"]
    assert len(lines) == 14
    app.reports.show_images(tmp_path, names, train, val, images, ["left out: a"], most=10)
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_a_list_beside_shards_is_shown_without_reading_all_of_it(app, drawn, tmp_path, capsys):
    read = []

    class Counted(app.data.Images):
        def get_example(self, i: int):
            read.append(i)
            return super().get_example(i)

    train = app.data.ImageList.read(drawn / "train.txt")
    shards = app.shards.Shards(tmp_path, ["0.tar"], np.array([5]), [9000], 10)
    images = Counted(train, drawn, 24)
    app.reports.show_images(tmp_path, [*map(str, range(10))], train, shards, images)
    assert len(read) == 24
    first, title, *_ = capsys.readouterr().out.splitlines()
    assert first == "60 images to train with, 5 to validate with"
    assert title.split() == ["class", "train"]


def test_confusion_of_any_names(app, tmp_path):
    names = ["$x_1$", "caf\udce9", "blue\u2028jay", "\u72d7", "$\\bad$"]
    drawn = []
    for i, part in enumerate((names, names[::-1])):
        path = tmp_path / f"any_names_{i}.png"  # tests draw only the first picture of each name
        app.evaluation.draw_confusion(np.eye(5, dtype=int), part, path)
        drawn.append(path.read_bytes())
    assert drawn[0] != drawn[1]


def test_mean_image_that_may_do_harm(app, tmp_path):
    with open(tmp_path / "mean.npy", "wb") as file:
        about = {"descr": "<f4", "fortran_order": False, "shape": (3, 1 << 20, 1 << 20)}
        np.lib.format.write_array_header_1_0(file, about)
    with pytest.raises(ValueError, match=r"mean\.npy: expected an array .* greater than file si"):
        app.data.read_statistics(tmp_path / "mean.npy")
    os.truncate(tmp_path / "mean.npy", 1 << 40)
    with pytest.raises(ValueError, match=r"mean\.npy: expected at most 67108864 bytes, got 1099"):
        app.data.read_statistics(tmp_path / "mean.npy")
    np.savez(tmp_path / "mean.npz", mean=np.zeros((3, 9, 9)))
    cut_off = b"\x93NUMPY\1\0\2\0{("  # NumPy raises TokenError
    for content in (cut_off, (tmp_path / "mean.npz").read_bytes()):
        (tmp_path / "mean.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"mean\.npy: expected an array in NumPy's format"):
            app.data.read_statistics(tmp_path / "mean.npy")
    (tmp_path / "mean.npy").unlink()
    os.mkfifo(tmp_path / "mean.npy")
    with pytest.raises(ValueError, match=r"mean\.npy: expected a regular file"):
        app.data.read_statistics(tmp_path / "mean.npy")


def test_example_depends_on_epoch_and_seed_alone(app, drawn):
    listed = app.data.ImageList.read(drawn / "train.txt")
    images, twin = (app.data.Images(listed, drawn, 32, seed=5) for _ in range(2))
    other = app.data.Images(listed, drawn, 32, seed=6)
    first, label = images[8]
    assert (first.shape, first.dtype, label, label.dtype) == ((3, 32, 32), np.uint8, 8, np.int32)
    assert first.nbytes + label.nbytes == images.example_bytes
    np.testing.assert_array_equal(first, twin[8][0])
    next_epoch, label = images[8 + 60]
    assert label == 8
    assert (first != next_epoch).any() and (first != other[8][0]).any()

    validation = app.data.Images(listed, drawn, 32)
    np.testing.assert_array_equal(validation[8][0], validation[68][0])


def test_order_tells_the_epoch(app):
    n, size = 11, 2
    samplers = [DistributedOrderSampler(n, r * 5, r * 5 + 6, seed=1) for r in range(size)]
    orders = [app.data.EpochOrder(sampler) for sampler in samplers]
    current = [np.arange(n)] * size
    for epoch in range(3):
        current = [order(now, 0) for order, now in zip(orders, current, strict=True)]
        assert set(np.concatenate(current)) == set(range(epoch * n, (epoch + 1) * n))
    resumed = app.data.EpochOrder(DistributedOrderSampler(n, 0, 6, seed=1))
    resumed(np.arange(n), 0)
    np.testing.assert_array_equal(resumed(current[0], 0), orders[0](current[0], 0))


def test_statistics_of_either_file(app, tmp_path):
    written = {"mean": [1.5, 2, 3], "deviation": [4, 5, 6]}
    (tmp_path / "mean.json").write_text(json.dumps(written))
    assert app.data.read_statistics(tmp_path / "mean.json") == written
    image = np.arange(3 * 4 * 6, dtype=np.float32).reshape(3, 4, 6)
    np.save(tmp_path / "mean.npy", image)
    found = app.data.read_statistics(tmp_path / "mean.npy")
    assert found == {"mean": [11.5, 35.5, 59.5], "deviation": [255] * 3}


SHAPE = r"expected numbers of shape \(3, height, width\), got"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), f"{SHAPE} float64 of shape \\(3,\\)"),
        (np.zeros((4, 5, 3)), f"{SHAPE} float64 of shape \\(4, 5, 3\\)"),
        (np.full((3, 2, 2), "a"), f"{SHAPE} <U1 of shape \\(3, 2, 2\\)"),
        (np.full((3, 2, 2), np.nan), r"expected means from 0 to 255, got \[nan, nan, nan\]"),
        (np.full((3, 2, 2), 256), r"expected means from 0 to 255, got \[256"),
        (np.full((3, 2, 2), None), "expected an array in NumPy's format"),
    ],
)
def test_error_for_what_is_not_a_mean_image(app, array, message, tmp_path):
    np.save(tmp_path / "mean.npy", array)
    with pytest.raises(ValueError, match=rf"mean\.npy: {message}"):
        app.data.read_statistics(tmp_path / "mean.npy")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mean.npy", "", "expected an array"),
        ("mean.npy", "text", "expected an array"),
        ("mean.json", "{}", "'mean' is missing"),
        ("mean.json", "[", "not JSON"),
        (
            "mean.json",
            '{"mean": [1, 2, NaN], "deviation": [1, 2, 3]}',
            "not JSON .NaN is not a num",
        ),
        ("mean.json", '{"mean": [1, 2, 3], "deviation": [1, 2]}', "'deviation': expected a list"),
        ("mean.json", '{"mean": [1, 2, 3], "deviation": [1, 2, 0]}', "expected deviations above"),
    ],
)
def test_error_for_other_statistics(app, name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: {message}"):
        app.data.read_statistics(tmp_path / name)


def test_least_area_of_what_is_cut_out(app, tmp_path):
    columns = np.tile(np.arange(200, dtype=np.uint8), (200, 1))
    Image.fromarray(columns).save(tmp_path / "columns.png")
    listed = app.data.ImageList(["columns.png"] * 100, [0] * 100)

    def narrowest(least):
        images = app.data.Images(listed, tmp_path, 24, seed=0, least=least)
        return min(np.ptp(image) / 200 for image, _ in images[:])

    # Aspect ratios range from 3/4 to 4/3.
    assert narrowest(0.9) > 0.8
    assert narrowest(0.08) < 0.35


def test_unreadable_files(app, drawn, tmp_path):
    content = (drawn / "val/heart-00009.jpg").read_bytes()
    (tmp_path / "good.jpg").write_bytes(content)
    (tmp_path / "short.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.jpg").write_text("no image")
    names = ["good.jpg", "short.jpg", "text.jpg", "absent.jpg"]
    images = app.data.Images(app.data.ImageList(names, [4] * 4), tmp_path, 24)
    batch = images[:]
    reasons = ["runcated", "expected a picture in one of", "No such file"]
    for example, name, reason in zip(batch[1:], names[1:], reasons, strict=True):
        assert example.path == str(tmp_path / name)
        assert reason in example.reason

    with pytest.raises(
        SystemExit, match=re.escape(f"error: cannot read {tmp_path / 'short.jpg'} on ")
    ):
        app.data.ToBatch([0] * 3, [1] * 3)(batch)
    to_batch = app.data.ToBatch([100, 110, 120], [50, 60, 70], skip=True)
    x, t = to_batch(batch)
    assert (x.shape, x.dtype, t.tolist(), len(to_batch.skipped)) == (
        (1, 3, 24, 24),
        np.float32,
        [4],
        3,
    )
    expected = (batch[0][0][1] - 110.0) / 60
    np.testing.assert_allclose(x[0, 1], expected, rtol=1e-5, atol=1e-6)
    x, t = to_batch(batch[1:])
    assert (x.shape, t.shape, len(to_batch.skipped)) == ((0, 3, 24, 24), (0,), 3)
    with pytest.raises(SystemExit, match="none of the images of a batch"):
        app.training.Classifier(chainer.Link())(x, t)


def test_mixed16_batches_are_float16(app, drawn):
    images = app.data.Images(app.data.ImageList.read(drawn / "val.txt"), drawn, 24)
    with chainer.using_config("dtype", chainer.mixed16):
        x, _ = app.data.ToBatch([128] * 3, [64] * 3)(images[:2])
    assert x.dtype == np.float16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, chainer.mixed16])
def test_a_gpu_makes_the_same_batch(app, drawn, dtype):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    batch = app.data.Images(app.data.ImageList.read(drawn / "val.txt"), drawn, 24)[:]
    to_batch = app.data.ToBatch([101, 110, 120], [51, 60, 70])
    with chainer.using_config("dtype", dtype):
        for one, other in zip(
            to_batch(batch, chainer.get_device("@cupy:0")), to_batch(batch), strict=True
        ):
            np.testing.assert_array_equal(cuda.to_cpu(one), other, strict=True)


def test_drawn_images_are_always_the_same(app, drawn, tmp_path):
    app.generated.create(tmp_path / "again", 20, 10)
    lines = (tmp_path / "again/train.txt").read_text().splitlines()
    assert lines == (drawn / "train.txt").read_text().splitlines()[:20]
    for line in lines:
        name = line.split()[0]
        assert (tmp_path / "again" / name).read_bytes() == (drawn / name).read_bytes()
    sizes = set()
    for path in (drawn / "train").iterdir():
        with Image.open(path) as image:
            sizes.add(image.size)
    assert (min(sizes), max(sizes), len(sizes)) == ((48, 48), (96, 96), 36)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]


def test_evaluator_counts_every_image_once(app):
    class Fixed(chainer.Chain):
        def predictor(self, x):
            return chainer.Variable(x)

    scores = np.random.default_rng(0).permuted(np.tile(np.arange(8.0), (10, 1)), axis=1)
    labels = np.arange(10, dtype=np.int32) % 8
    examples = [*zip(scores.astype(np.float32), labels, strict=True)]
    iterator = chainer.iterators.SerialIterator(examples, 4, repeat=False, shuffle=False)
    evaluator = app.evaluation.TopKEvaluator(
        iterator, Fixed(), 8, chainer.dataset.concat_examples, chainer.get_device("@numpy")
    )
    found = evaluator()
    ranks = (scores > scores[np.arange(10), labels][:, None]).sum(axis=1)
    assert found["main/accuracy"] == pytest.approx((ranks == 0).mean())
    assert found["main/top5"] == pytest.approx((ranks < 5).mean())
    assert evaluator.confusion.sum() == 10
    assert evaluator.confusion.sum(axis=1).tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    assert np.trace(evaluator.confusion) == (ranks == 0).sum()
