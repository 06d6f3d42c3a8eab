"""Random folders of images: what prepare.py lists and names as left out is all there is."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from chainermn.testing.modules import modules_of

APPS = Path(__file__).resolve().parent

# Anything that a file can be called, and what has spoiled lists before.
NAMES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.text("a 1\t\r\u2028\u0085\u00a0\u3000\ufeff\x0b\x1c\xe9", min_size=1, max_size=6).map(
        str.encode
    ),
).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))
CLASSES = NAMES.filter(lambda name: not name.startswith(b"."))
TREES = st.dictionaries(CLASSES, st.sets(NAMES, min_size=2, max_size=3), min_size=2, max_size=3)
# A list as people write it, line by line: the path, what is between, the label.
LINES = st.lists(
    st.tuples(NAMES, st.sampled_from([b" ", b"  ", b"\t"]), st.integers(0, 9)), min_size=1
)
LINE = re.compile(rb"(.*[^ \t])[ \t]+([0-9]+)[ \t\r]*", re.DOTALL)


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file, read in another way than the app does."""
    *lines, last = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert last == b""
    return lines


@pytest.fixture(scope="module")
def app():
    with modules_of(APPS / "imagenet", ["data", "prepare"]) as modules:
        yield modules


@pytest.mark.mpi(1)
@pytest.mark.parametrize("n", [25, pytest.param(1000, marks=pytest.mark.nightly)])
def test_folders_are_listed_whole_or_refused(app, capsys, n):
    @settings(max_examples=n, deadline=None)
    @given(TREES, st.integers(0, 2), st.integers(0, 2))
    def on_random_trees(tree, n_ignored, n_hidden):
        with tempfile.TemporaryDirectory() as folder:
            check(app, capsys, os.fsencode(folder), tree, n_ignored, n_hidden)

    on_random_trees()


def check(app, capsys, top, tree, n_ignored, n_hidden):
    root, out = os.path.join(top, b"photos"), Path(os.fsdecode(top), "lists")
    for name, files in tree.items():
        os.makedirs(os.path.join(root, name, b"@eaDir"))
        for file in files:
            path = os.path.join(root, name, b"x" + file + b".png")
            Image.new("RGB", (4, 4), tuple(os.urandom(3))).save(os.fsdecode(path))
        for kind, count in ((b"%d.HEIC.txt", n_ignored), (b"@eaDir/%d.png", n_hidden)):
            for i in range(count):
                Path(os.fsdecode(os.path.join(root, name, kind % i))).touch()
    options = [os.fsdecode(root), "--hold-out", "0.5", "--out", str(out), "--size", "8"]
    capsys.readouterr()
    everything = [name for name, files in tree.items() for name in (name, *files)]
    if any(b"\n" in name for name in everything) or any(
        name.endswith(b"\r") or not os.fsdecode(name).strip() for name in tree
    ):
        with pytest.raises(SystemExit, match="rename it"):
            app.prepare.main(options)
        assert not out.exists()
        return
    app.prepare.main(options)
    shown = capsys.readouterr().out
    classes = sorted(tree, key=os.fsdecode)
    assert lines_of(out / "classes.txt") == classes
    pairs = [
        LINE.fullmatch(line).groups()
        for part in ("train", "val")
        for line in lines_of(out / f"{part}.txt")
    ]
    expected = [
        (name + b"/x" + file + b".png", b"%d" % label)
        for label, name in enumerate(classes)
        for file in tree[name]
    ]
    assert sorted(pairs) == sorted(expected)
    for count, what in ((n_ignored, ".txt, such as"), (n_hidden, "hidden or a system's")):
        number = count * len(tree)
        assert (f"left out: {number} file" in shown and what in shown) == (number > 0)


@settings(max_examples=100, deadline=None)
@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_lists_are_read_as_they_are_written(app, rows, end, has_mark):
    rows = [(b"x" + name.replace(b"\n", b"_"), gap, label) for name, gap, label in rows]
    content = [b"%b%b%d%b" % (name, gap, label, end) for name, gap, label in rows]
    labels = {}
    for name, _, label in rows:
        path = os.path.normpath(name.rstrip(b" \t"))
        assume(labels.setdefault(path, label) == label)
    if has_mark:
        content[0] = b"\xef\xbb\xbf" + content[0]
    listed = app.data.ImageList.parse(content, "list.txt")
    found = [listed[i] for i in range(len(listed))]
    assert found == [(os.fsdecode(name.rstrip(b" \t")), label) for name, _, label in rows]
    assert listed.repeated == len(rows) - len(labels)
