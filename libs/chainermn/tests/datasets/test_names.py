"""Names of classes survive a file, and labels have to fit them."""

import io
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chainermn.datasets import names

# Every name that a folder can have, bytes that are not UTF-8 among them.
FOLDER_NAMES = (
    st.binary(min_size=1, max_size=12)
    .map(
        lambda name: name.replace(b"\0", b"_").replace(b"/", b"_").decode(errors="surrogateescape")
    )
    .filter(lambda name: name not in (".", ".."))
)
LINES = st.lists(
    st.one_of(FOLDER_NAMES, st.text("a \u2028\u0085\x0b\x1c\u00a0\ufeff\r", min_size=1))
)


@given(LINES)
@example(["\ufeffcat", "dog"])
@example(["blue\u2028jay", "x\u0085", "fire engine", "caf\udce9", " a", "\u3000b"])
def test_names_survive_or_are_refused(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "names.txt"
    path.unlink(missing_ok=True)
    if all(line.strip() and "\n" not in line and line[-1] != "\r" for line in lines):
        names.write_names(path, lines)
        if lines:
            assert names.read_names(path) == lines
    else:
        with pytest.raises(ValueError, match="no line can hold the name"):
            names.write_names(path, lines)
        assert not path.exists()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"cat\ndog\n", ["cat", "dog"]),
        (b"cat\r\ndog", ["cat", "dog"]),
        (b"\xef\xbb\xbfcat\r\n", ["cat"]),
        (b"a\rb\n", ["a\rb"]),
        (b"caf\xe9\n", ["caf\udce9"]),
    ],
)
def test_lines_end_at_lf_or_crlf(content, found):
    assert names.parse_names(content, "names.txt") == found


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "names.txt: expected 1 to 3 names, got 0"),
        (b"a\nb\nc\nd\n", "names.txt: expected 1 to 3 names, got 4"),
        (b"a\n \t\r\nb\n", "names.txt:2: expected the name of a class, got a blank line"),
        (b"a\nb\n\n", "names.txt:3: expected the name of a class, got a blank line"),
        (b"a\rb\r", r"names.txt: expected lines that end with LF or CRLF, got CR: tr '\r' '\n' <"),
        ("cat\n".encode("utf-16"), "names.txt: expected UTF-8, got NUL bytes"),
    ],
)
def test_files_that_are_refused(content, reason):
    with pytest.raises(ValueError) as caught:
        names.parse_names(content, "names.txt", most=3)
    assert str(caught.value).startswith(reason)


def test_labels_are_counted():
    counts = names.check_labels([2, 0, 2], list("abcd"), "train.txt")
    assert counts.tolist() == [1, 0, 2, 0]
    assert names.check_labels([2, 0], list("abc"), "train.txt", several=True).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"^a.txt: expected examples of several .*got 2, all of"):
        names.check_labels([1, 1], list("abc"), "a.txt", several=True)
    assert names.check_labels([], ["a"], "train.txt").tolist() == [0]


@pytest.mark.parametrize(
    ("labels", "is_shifted"), [([1, 2, 3], True), ([0, 3], False), ([-1], False), ([1, 4], False)]
)
def test_labels_without_a_name(labels, is_shifted):
    with pytest.raises(ValueError) as caught:
        names.check_labels(np.array(labels), list("abc"), "val.txt")
    expected = f"labels from 0 to 2 for 3 names, got {min(labels)} to {max(labels)}"
    assert str(caught.value).startswith(f"val.txt: expected {expected}: ")
    assert ("subtract 1 from every label" in str(caught.value)) == is_shifted


def test_natural_order():
    assert names.naturally_sorted(["10", "9", "a10", "a9", "b"]) == ["9", "10", "a9", "a10", "b"]


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("été", "été"),
        ("caf\udce9", r"'caf\udce9'"),
        ("", "''"),
        ("a ", "'a '"),
        ("a\tb", r"'a\tb'"),
        ("fire\u00a0engine", r"'fire\xa0engine'"),
        ("été\u00a0!", r"'été\xa0!'"),
        ("می\u200cروم", "می\u200cروم"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("cat\u200c", r"'cat\u200c'"),
        ("ca\u200dt", r"'ca\u200dt'"),
        ("\u200d", r"'\u200d'"),
    ],
)
def test_names_are_shown_so_that_people_can_tell_them_apart(name, seen):
    assert names.shown(name) == seen


def test_names_are_shown_in_the_characters_that_standard_output_has(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert names.shown("été 日本") == r"été \u65e5\u672c"
