"""Every file of a folder is found, or named as left out."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn.datasets.folders import (
    Found,
    check_classes,
    find_classes,
    find_files,
    find_folders,
)

PARTS = st.sampled_from(["cat", "Dog", "10", "2", ".git", "@eaDir", "__MACOSX", "caf\udce9", " x"])
FILES = st.sampled_from(
    ["a.jpg", "B.JPG", "c.HEIC", "d", "._a.jpg", "Thumbs.db", ".e.jpg", "f.tar.gz", "\udce9.jpg"]
)
TREES = st.sets(
    st.tuples(st.lists(PARTS, max_size=3), FILES).map(lambda t: (*t[0], t[1])), max_size=12
)
HIDDEN = {".git", "@eaDir", "__MACOSX", "._a.jpg", "Thumbs.db", ".e.jpg"}


def make(root: Path, tree: set[tuple[str, ...]]) -> None:
    for parts in tree:
        path = root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_what_is_found_and_what_is_left_out_is_all_there_is(n):
    @settings(max_examples=n)
    @given(TREES)
    def on_random_trees(tree: set[tuple[str, ...]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder), tree)

    on_random_trees()


def check(root: Path, tree: set[tuple[str, ...]]) -> None:
    make(root, tree)
    found = find_files(root, {".jpg", ".gz"})
    visible = {parts for parts in tree if HIDDEN.isdisjoint(parts)}
    wanted = {parts for parts in visible if parts[-1].lower().endswith((".jpg", ".gz"))}
    assert {Path(path).relative_to(root).parts for path in found.files} == wanted
    ignored = [Path(path).relative_to(root).parts for of in found.ignored.values() for path in of]
    assert sorted(ignored) == sorted(visible - wanted)
    assert set(found.ignored) == {Path(parts[-1]).suffix.lower() for parts in visible - wanted}
    assert found.hidden == len(tree - visible)
    assert find_folders(root) == sorted({p[0] for p in tree if len(p) > 1} - HIDDEN)
    top = find_files(root, {".jpg", ".gz"}, below=False)
    assert {Path(path).name for path in top.files} == {p[0] for p in wanted if len(p) == 1}


def test_files_are_sorted_as_text(tmp_path):
    make(tmp_path, {("10", "b.jpg"), ("2", "a.jpg"), ("b.jpg",), ("10", "B.jpg"), ("a.jpg",)})
    found = [os.path.relpath(path, tmp_path) for path in find_files(tmp_path, {".jpg"}).files]
    assert found == ["a.jpg", "b.jpg", "10/B.jpg", "10/b.jpg", "2/a.jpg"]


def test_links_are_followed_once(tmp_path):
    make(tmp_path, {("photos", "cat", "a.jpg")})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/linked").symlink_to("../photos/cat")
    assert find_files(tmp_path / "data", {".jpg"}).files == [f"{tmp_path}/data/linked/a.jpg"]
    (tmp_path / "photos/cat/circle").symlink_to(".")
    message = "linked and .*circle are the same folder .one is a link.: remove one"
    with pytest.raises(ValueError, match=message):
        find_files(tmp_path / "data", {".jpg"})


def test_folders_that_are_missing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        find_files(tmp_path / "nowhere", {".jpg"})


def test_classes_are_folders(tmp_path):
    make(tmp_path, {("dog", "more", "a.jpg"), ("cat", "b.JPG"), ("cat", "c.HEIC"), ("d.jpg",)})
    found = find_classes(tmp_path, ["dog", "cat"], {".jpg"})
    assert list(found) == ["dog", "cat"]
    assert found["dog"] == Found([f"{tmp_path}/dog/more/a.jpg"])
    assert found["cat"] == Found([f"{tmp_path}/cat/b.JPG"], {".heic": [f"{tmp_path}/cat/c.HEIC"]})
    check_classes(tmp_path, found)


def test_classes_that_cannot_be_meant_are_refused(tmp_path):
    make(tmp_path, {("cat", "a.jpg"), ("cow", "b.HEIC"), ("cow", ".c.jpg")})
    with pytest.raises(
        FileNotFoundError, match=r"cow contains no image; left out: 1 file .heic, such .*: convert"
    ):
        find_classes(tmp_path, ["cat", "cow"], {".jpg"}, lambda ending: "convert")
    (tmp_path / "dog").symlink_to("cat")
    with pytest.raises(ValueError, match=r"/cat and .*/dog are the same folder .one is a link"):
        find_classes(tmp_path, ["cat", "dog"], {".jpg"})
    (tmp_path / "dog").unlink()
    make(tmp_path, {("dog", "d.jpg")})
    (tmp_path / "cat/more").symlink_to("../dog")
    with pytest.raises(ValueError, match=r"/cat/more and .*/dog are the same folder"):
        find_classes(tmp_path, ["cat", "dog"], {".jpg"})
    make(tmp_path, {("caf\u00e9", "a.jpg"), ("cafe\u0301", "a.jpg")})
    with pytest.raises(ValueError, match=r"'caf\\xe9' and 'cafe\\u0301' look alike"):
        find_classes(tmp_path, ["caf\u00e9", "cafe\u0301"], {".jpg"})
    with pytest.raises(ValueError, match=r"animals has one class, cat, which would always be"):
        check_classes("animals", {"cat": Found(["a.jpg"])})
    few = Found(["a.jpg"], {"": ["b"] * 9})
    check_classes("animals", {"cat": few, "dog": few})
    few.ignored[".gif"] = ["c.gif"]
    with pytest.raises(ValueError, match=r"^animals/cat: only 1 of 11 files can be read; left"):
        check_classes("animals", {"cat": few, "dog": few})


def test_what_is_left_out_is_told_with_an_example():
    parts = [
        Found(ignored={".heic": ["a.HEIC", "b.HEIC"], "": ["c"]}, hidden=1),
        Found(ignored={".heic": ["d.HEIC"], ".avif": ["e.avif"], ".txt": ["f.txt"]}),
    ]
    hints = {".heic": "pip install it"}
    assert Found.joined(parts).left_out(lambda ending: hints.get(ending, ""), most=2) == [
        "left out: 3 files .heic, such as a.HEIC: pip install it",
        "left out: 1 file without an ending, such as c",
        "left out: 2 files of 2 other endings: .avif, .txt",
        "left out: 1 file, hidden or a system's",
    ]
    assert Found(["a.jpg"]).left_out() == []
