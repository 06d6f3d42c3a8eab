"""Lines of text are read as people mean them, or their file is refused by name."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import tracemalloc
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chainermn.datasets import texts
from chainermn.datasets.stamps import Stamp

BOM = "\ufeff".encode()
# All that splits or strips lines elsewhere, letters with and without their accents in one, a byte
# order mark, and bytes that are not UTF-8.
PIECES = [
    *"a ü\u0308\u2028\u2029\u0085\u00a0\u202f\u3000\r\t\x0b\x0c\x1c\x1e漢😀",
    "u\u0308",
    "\ufeff",
]
CONTENT = st.lists(
    st.sampled_from(
        [
            *(piece.encode() for piece in PIECES),
            b"\n",
            b"\n",
            b"\r\n",
            b"\xff",
            b"\xc3",
            b"\xed\xa0\x80",
        ]
    ),
    max_size=25,
).map(b"".join)


def lines_of(content: bytes) -> list[str | None]:
    """Return what `read_lines` should, by decoding everything before it is divided."""
    *lines, last = content.decode(errors="surrogateescape").split("\n")
    found = []
    for line in [*lines, last] if last else lines:
        line = line[1:] if line.startswith("\ufeff") else line
        composed = unicodedata.normalize("NFC", unicodedata.normalize("NFD", line))
        is_valid = not any("\udc80" <= letter <= "\udcff" for letter in line)
        found.append(composed.strip() if is_valid else None)
    return found


@given(CONTENT, st.booleans(), st.sampled_from(["text", "text.gz"]))
@example(BOM + b"cat\r\ndog\n" + BOM + b"bird", True, "text")
@settings(max_examples=200)
def test_lines_are_those_of_another_reader(tmp_path_factory, content, is_packed, name):
    folder = tmp_path_factory.getbasetemp()
    path = folder / name
    path.write_bytes(gzip.compress(content) if is_packed else content)
    wanted = lines_of(content)
    returns = content.count(b"\r") - content.count(b"\r\n")
    if 2 * returns > content.count(b"\n") + 1 or 2 * wanted.count(None) > len(wanted):
        with pytest.raises(ValueError, match=f"{path}:.* expected .* got "):
            list(texts.read_lines(path))
        return
    assert list(texts.read_lines(path)) == wanted
    plain = texts.unpacked(path, folder).path
    assert plain.read_bytes() == content
    assert (plain == path) == (not is_packed)
    # By their positions.
    with plain.open("rb") as file:
        raw = [line for line, _ in texts.lines_in(file, plain)]
    assert b"".join(raw) == content
    lines = texts.LinesAt(Stamp.of(plain))
    for i, text in enumerate(wanted):
        if text:
            assert lines.read(sum(map(len, raw[:i]))) == text
    lines.close()
    if is_packed:
        plain.unlink()


def test_letters_stay_as_they_are_without_a_form(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("u\u0308ber\n".encode())
    assert list(texts.read_lines(path)) == ["über"]
    assert list(texts.read_lines(path, form=None)) == ["u\u0308ber"]
    lines = texts.LinesAt(Stamp.of(path), form=None)
    assert lines.read(0) == "u\u0308ber"
    lines.close()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("content", "line", "found", "remedy"),
    [
        ("a\nb\n".encode("utf-16"), 1, "UTF-16", "iconv -f UTF-16 "),
        (b"\xfe\xff" + "a\nb\n".encode("utf-16-be"), 1, "UTF-16", "iconv -f UTF-16 "),
        ("a\nb\n".encode("utf-32"), 1, "UTF-32", "iconv -f UTF-32 "),
        *(
            (text.encode(form), line, f"NUL bytes, as in {form}", f"iconv -f {form} ")
            for form, lines in {
                "UTF-16LE": (1, 2, 1),
                "UTF-16BE": (1, 1, 1),
                "UTF-32LE": (1, 1, 1),
                "UTF-32BE": (1, 1, 1),
            }.items()
            # The NUL byte of 一 (U+4E00) is where one of a Latin letter is not.
            for text, line in zip(("a b\n", "漢\n漢\n", "一上\r\n"), lines, strict=True)
        ),
        ("日本\n".encode("iso-2022-jp"), 1, "escape sequences, as in ISO-2022-JP", "iconv -f ISO"),
        (gzip.compress(gzip.compress(b"a\n", mtime=0), mtime=0), 1, "gzip in gzip", "gunzip "),
        (b"%PDF-1.7\n", 1, "PDF", "pdftotext "),
        (b"\xfd7zXZ\0\0\4", 1, "xz", "unxz "),
        (b"PK\3\4\n", 1, "zip", "unzip "),
    ],
)
def test_other_encodings_and_formats_are_refused(
    content, line, found, remedy, is_packed, tmp_path
):
    path = tmp_path / "text"
    path.write_bytes(gzip.compress(content) if is_packed else content)
    expected = f"{path}:{line}: expected text in UTF-8, got {found}. This makes it: {remedy}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        list(texts.read_lines(path))
    with pytest.raises(ValueError, match=re.escape(expected)):
        list(texts.read_lines(path))
    if is_packed:
        with pytest.raises(ValueError, match=re.escape(expected)):
            texts.unpacked(path, tmp_path)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"a\nb\0c\n", b"a\n" * 9999 + "\n".encode("utf-16-le")])
def test_nul_bytes_that_are_of_no_encoding(content, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"got NUL bytes: it is damaged, or no text$"):
        list(texts.read_lines(path))


def test_lines_in_another_encoding(tmp_path, capsys):
    """A few are left out, with a word about the first. If they are most, the encoding is wrong."""
    path = tmp_path / os.fsdecode(b"z\xfcrich")
    name, remedy = ascii(str(path)), "If this is Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW "
    path.write_bytes("grün\n".encode() + "grün\nüber\n".encode("latin-1") + b"a\n")
    assert list(texts.read_lines(path)) == ["grün", None, None, "a"]
    said = f"{name}:2: not UTF-8 (2 of 4 lines, which are left out). {remedy}"
    shown = capsys.readouterr().out
    assert shown.startswith(said) and shown.count("\n") == 1
    path.write_bytes("grün\n".encode() + "grün\nüber\n".encode("latin-1"))
    expected = f"{name}:2: expected text in UTF-8, got another encoding (2 of 3 lines). {remedy}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        list(texts.read_lines(path))
    assert capsys.readouterr().out == ""


def test_carriage_returns_that_end_lines(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a\rb\nc\n" + b"d\r\n" * 9 + b"e\r")
    assert list(texts.read_lines(path)) == ["a\rb", "c", *"d" * 9, "e"]
    for content, line in (
        (b"a\rb", 1),
        (b"a\rb\r" * 300_000, 1),
        (b"a\n" * 20 + b"b\r" * 20, 21),
    ):
        path.write_bytes(content)
        expected = f"{path}:{line}: expected lines that end with LF or CRLF, got CR, as on old"
        with pytest.raises(ValueError, match=re.escape(expected)):
            list(texts.read_lines(path))


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"a\n" * 999, mtime=0)[:-9],
        gzip.compress(b"a\n", mtime=0) + b"rest",
        b"\x1f\x8b",
    ],
    ids=["cut", "rest", "start"],
)
def test_damaged_gzip(content, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(content)
    for read in (lambda: list(texts.read_lines(path)), lambda: texts.unpacked(path, tmp_path)):
        with pytest.raises(ValueError, match=f"{path}: damaged gzip file"):
            read()
    assert list(tmp_path.iterdir()) == [path]


def test_copy_that_is_damaged_is_not_used(tmp_path):
    path = tmp_path / ("a" * 252 + ".gz")
    path.write_bytes(gzip.compress(b"a few words\n"))
    copy = texts.unpacked(path, tmp_path)
    assert texts.unpacked(path, tmp_path) == copy
    copy.path.write_bytes(b"a few w")
    again = texts.unpacked(path, tmp_path)
    assert (again.path, again.digest) == (copy.path, copy.digest)
    assert again.path.read_bytes() == b"a few words\n"
    assert sorted(tmp_path.iterdir()) == sorted([path, copy.path])


def test_copies_are_those_of_their_content(tmp_path):
    """Bgzip ends all its files with the same block, and `cat` joins files that change alone."""
    last = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
    paths = tmp_path / "en.gz", tmp_path / "de.gz"
    for path, text in zip(paths, (b"house\n", b"haus\n"), strict=True):
        path.write_bytes(gzip.compress(text) + last)
    english, german = (texts.unpacked(path, tmp_path).path for path in paths)
    assert (english.read_bytes(), german.read_bytes()) == (b"house\n", b"haus\n")
    packed = gzip.compress(b"Haus\n") + last
    paths[1].write_bytes(packed)
    corrected = texts.unpacked(paths[1], tmp_path).path
    assert (corrected.read_bytes(), german.read_bytes()) == (b"Haus\n", b"haus\n")
    # Other hosts have other times, but must find the same name.
    os.utime(paths[1], (0, 0))
    assert texts.unpacked(paths[1], tmp_path).path == corrected


def test_line_of_gigabytes(tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(b" " * (1 << 20))
    os.truncate(plain, 1 << 40)  # a hole, which takes no space
    packed.write_bytes(gzip.compress(b"a\nb\n") + gzip.compress(b" " * (1 << 24)) * 64)
    tracemalloc.start()
    try:
        for path, line in ((plain, 1), (packed, 3)):
            message = re.escape(f"{path}:{line}: expected a line of at most 1000000 bytes")
            with pytest.raises(ValueError, match=message):
                list(texts.read_lines(path))
            with pytest.raises(ValueError, match=message):
                texts.unpacked(path, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    assert sorted(tmp_path.iterdir()) == [packed, plain]


def test_text_that_was_packed_too_well(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress((b" " * 999 + b"\n") * 2000))
    with pytest.raises(ValueError, match=r"a\.gz: more than 1048576 bytes are in it: no text is"):
        texts.unpacked(path, tmp_path, most=1 << 20)
    assert list(tmp_path.iterdir()) == [path]


def test_pipes_are_not_waited_for(tmp_path):
    path = tmp_path / "a.gz"
    os.mkfifo(path)
    for read in (lambda: list(texts.read_lines(path)), lambda: texts.unpacked(path, tmp_path)):
        with pytest.raises(ValueError, match=r"a\.gz: expected a regular file, got a pipe or a"):
            read()


def test_standard_input_is_read_as_it_comes():
    read, write = os.pipe()
    with open(read, "rb") as file, open(write, "wb", buffering=0) as writer:
        lines = texts.lines_in(file, "standard input")
        for text in "ab":
            writer.write(text.encode() + b"\n")
            assert next(lines)[1] == text  # would hang if it waited for more
    packed = io.BufferedReader(io.BytesIO(gzip.compress(b"a\nb\n")))
    assert [text for _, text in texts.lines_in(packed, "standard input")] == ["a", "b"]


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[texts.LinesAt]:
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"line %04d\n" % i for i in range(1000)))
    lines = texts.LinesAt(Stamp.of(path))
    yield lines
    lines.close()


def test_forked_processes_do_not_move_each_other(lines):
    read, write = os.pipe()
    child = os.fork()
    wanted = [f"line {i:04}" for i in range(1000)]
    if child == 0:
        found = [lines.read(10 * i) for i in range(999, -1, -1)]
        os.write(write, b"right" if found[::-1] == wanted else b"wrong")
        os._exit(0)
    assert [lines.read(10 * i) for i in range(1000)] == wanted
    assert os.read(read, 9) == b"right"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("change", ["cut", "longer", "same size", "holes"])
def test_change_is_noticed_by_all_who_opened_it(lines, change):
    path = lines.stamp.path
    other = pickle.loads(pickle.dumps(lines))  # as workers that are spawned get it
    assert other.read(20) == "line 0002"
    if change == "cut":
        os.truncate(path, 5)
    elif change == "longer":
        with path.open("ab") as file:
            file.write(b"more\n")
    elif change == "same size":
        path.write_bytes(path.read_bytes().swapcase())
        os.utime(path, ns=(0, lines.stamp.time + 1))
    else:
        os.truncate(path, 0)
        os.truncate(path, 1 << 40)
    for reader in (lines, other):
        with pytest.raises(ValueError, match=f"{path} has changed since the index was made ."):
            reader.read(500)
    other.close()
    with pytest.raises(ValueError, match=f"{path} has changed since the index was made ."):
        pickle.loads(pickle.dumps(lines))


def test_positions_of_another_file(lines):
    with pytest.raises(ValueError, match=r"text: no line of text at byte 1000000: delete its ind"):
        lines.read(1000000)
