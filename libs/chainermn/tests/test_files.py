"""Files: what is left when writing one fails, and how reading a stranger's file ends."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from chainermn.files import (
    atomic_write,
    check_trained,
    exit_on_error,
    open_regular,
    open_tar,
    read_bytes,
    read_json,
    read_lines,
    read_text,
)

KILLED = """
import os, signal, sys
from chainermn.files import atomic_write

with atomic_write(sys.argv[1]) as file:
    file.write("new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_program_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended, exit_on_error():
        check_trained("a result/best.npz", tmp_path / "app" / "predict.py")
    assert ended.value.code == (
        "error: there is no trained network a result/best.npz: train first, such as with "
        "`mpiexec -n 2 python app/train.py --out 'a result'`, or name the file of another"
    )
    Path("best.npz").touch()
    check_trained("best.npz", "predict.py")
    with pytest.raises(FileNotFoundError, match=r"^there is no run\.json: train.py writes it"):
        check_trained("best.npz", "predict.py", "run.json")
    with pytest.raises(IsADirectoryError, match=r"is a folder: name a file in it, such as best"):
        check_trained(tmp_path, "predict.py")


@pytest.mark.parametrize(("mode", "content"), [("w", "ä\n"), ("wb", "ä\n".encode())])
def test_new_file_takes_the_place_of_the_old_one(
    mode: str, content: str | bytes, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, mode) as file:
        file.write(content)
        assert path.read_text() == "old"
    assert path.read_bytes() == "ä\n".encode()
    assert os.listdir(tmp_path) == ["file"]


def test_old_file_stays_if_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write("new")
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_old_file_stays_if_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, path]).returncode < 0
    assert path.read_text() == "old"


def test_words_of_the_block_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^not what was expected$"), atomic_write(tmp_path / "file"):
        raise OSError("not what was expected")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_to_full_disk(descriptor: int) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"new")

    monkeypatch.setattr(os, "fsync", write_to_full_disk)
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left") as raised, atomic_write(path) as file:
        file.write("new")
    assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_link_that_somebody_has_put_there_is_not_followed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n_bytes: "guessed")
    own = tmp_path / "own"
    own.write_text("precious")
    (tmp_path / ".file.guessed.tmp").symlink_to(own)
    with pytest.raises(FileExistsError), atomic_write(tmp_path / "file", mode):
        pass
    assert own.read_text() == "precious"


def test_names_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with atomic_write(tmp_path / "file"):
            names |= {*os.listdir(tmp_path)} - {"file"}
    assert len(names) == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
def test_what_may_never_end_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{path}: expected a regular file, got a pipe or a dev"):
        open_regular(path)


def test_file_of_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=f"{path}: expected at most 5 bytes, got 1099511627776"):
        read_bytes(path, 5)
    path.write_bytes(b"\xc3\xa4")
    assert read_text(path) == "ä"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=f"{path}: not UTF-8 .* 0xff in position 2"):
        read_text(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_bytes(tmp_path, 5)


READ_LINES = """
import resource, sys
from pathlib import Path
from chainermn.files import read_lines

resource.setrlimit(resource.RLIMIT_AS, (300_000_000, 300_000_000))
with open(sys.argv[1], "rb") as file:
    try:
        for line in read_lines(file, sys.argv[1]):
            print(line)
    except ValueError as error:
        print(error)
"""


def test_line_that_takes_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\r\n\ntwo\n")
    with path.open("rb") as file:
        assert list(read_lines(file, path)) == [b"one\r\n", b"\n", b"two\n"]
    os.truncate(path, 1 << 30)  # a hole, which takes no space
    command = [sys.executable, "-c", READ_LINES, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, error = done.stdout.splitlines()
    assert lines == [repr(line) for line in (b"one\r\n", b"\n", b"two\n")]
    assert error == f"{path}:4: expected a line of at most 1000000 bytes"


FORM = {
    "name": str,
    "flag": bool,
    "size": range(1, 100),
    "kind": {"a", "b"},
    "rates": [float],
    "pair": (int, int),
    "counts": {str: int},
    "maybe": str | None,
}
RIGHT = {"name": "a", "flag": True, "size": 99, "kind": "b", "rates": [1, 2.5], "pair": [1, 2]}
RIGHT |= {"counts": {"x": 1}, "maybe": None}


def as_json(**changes: str) -> str:
    """Return the right content as JSON, with some of it replaced by other JSON."""
    text = json.dumps(RIGHT)
    for key, value in changes.items():
        text = text.replace(f'"{key}": {json.dumps(RIGHT[key])}', f'"{key}": {value}')
    return text


def test_json_of_the_right_form(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**RIGHT, "more": "is ignored"}))
    assert read_json(path, FORM) == {**RIGHT, "more": "is ignored"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("\x00", "not JSON (Expecting value: line 1 column 1 (char 0))"),
        (
            "{\n1: 2}",
            "not JSON (Expecting property name enclosed in double quotes: line 2 column 1",
        ),
        ("[" * 1_000_000 + "]" * 1_000_000, "nested too deeply"),
        ("[1]", "expected an object, got [1]"),
        ("{}", "'name' is missing"),
        (as_json(name="5"), "'name': expected a string, got 5"),
        (as_json(flag="1"), "'flag': expected true or false, got 1"),
        (as_json(size="100"), "'size': expected an integer from 1 to 99, got 100"),
        (as_json(size="0"), "'size': expected an integer from 1 to 99, got 0"),
        (as_json(size="true"), "'size': expected an integer from 1 to 99, got True"),
        (as_json(size="7.0"), "'size': expected an integer from 1 to 99, got 7.0"),
        (as_json(kind='"c"'), "'kind': expected one of a, b, got 'c'"),
        (as_json(kind="[]"), "'kind': expected one of a, b, got []"),
        (as_json(rates="{}"), "'rates': expected a list, got {}"),
        (as_json(rates="[1, true]"), "'rates'[1]: expected a finite number, got True"),
        (as_json(rates="[NaN]"), "not JSON (NaN is not a number)"),
        (as_json(rates="[-1e999]"), "'rates'[0]: expected a finite number, got -inf"),
        (as_json(rates=f"[1{'0' * 400}]"), "'rates'[0]: expected a finite number, got 1000"),
        (as_json(rates=f"[1{'0' * 5000}]"), "not JSON (Exceeds the limit"),
        (as_json(pair="[1]"), "'pair': expected a list of 2, got [1]"),
        (as_json(counts='{"y": "z"}'), "'counts': 'y': expected an integer, got 'z'"),
        (as_json(maybe="1"), "'maybe': expected a string or null, got 1"),
        (
            as_json(name=f"[{'9, ' * 10000} 9]"),
            "'name': expected a string, got [9, 9, 9, 9, 9, 9, .",
        ),
    ],
    ids=[*map(str, range(24))],
)
def test_json_of_another_form(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")) as caught:
        read_json(path, FORM)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_json_of_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=r"a\.json: expected at most 67108864 bytes"):
        read_json(path, FORM)


def member(name: str, content: bytes = b"", size: int | None = None, kind: bytes = b"0") -> bytes:
    """Return the bytes of a member of a tar file; its header may lie about the size."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content) if size is None else size, kind
    header = info.tobuf(tarfile.GNU_FORMAT)
    return header + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def pax(*records: str) -> bytes:
    """Return the records of an extended header, each with a length of two digits."""
    return b"".join(b"%d %s\n" % (len(record) + 4, record.encode()) for record in records)


FILE = member("file", b"content")
END = bytes(2 * tarfile.BLOCKSIZE)


def through_a_pipe(content: bytes) -> BinaryIO:
    """Return a file that has the content, of less than 64 KiB, and cannot seek."""
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(content)
    return open(reading, "rb")


@pytest.mark.parametrize("opened", [io.BytesIO, through_a_pipe])
def test_members_of_a_tar_file(opened: Callable[[bytes], BinaryIO]) -> None:
    name = "long/" * 100
    whole = member("L", name.encode() + b"\0", kind=b"L") + FILE
    whole += member("skipped", bytes(10_000))
    whole += member("x", pax("path=a/file", "comment=nothing"), kind=b"x") + FILE + END
    with opened(whole) as file, open_tar(file) as archive:
        found = [
            (info.name, archive.extractfile(info).read())
            for info in archive
            if info.name != "skipped"
        ]
    assert found == [(name, b"content"), ("a/file", b"content")]


def test_names_in_a_tar_file_are_as_long_as_paths() -> None:
    name = "long/" * 819
    record = f" path={name}\n"
    header = f"{len(record) + 4}{record}".encode()
    whole = member("x", header, kind=b"x") + FILE + END
    with open_tar(io.BytesIO(whole)) as archive:
        assert archive.getnames() == [name.rstrip("/")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FILE + member("back", size=-512), "damaged header before byte 1536"),
        (FILE + member("back", size=-1), "damaged header before byte 1536"),
        (member("x", pax("size=-1024"), kind=b"x") + FILE, "damaged header before byte 1536"),
        (FILE + member("x", size=-512, kind=b"x"), "header of -512|damaged header before"),
        (FILE + FILE.replace(b"file", b"fine"), "damaged header before byte 1536"),
        *(
            (FILE + member("x", b"1" * 8000, kind=bytes([kind])), "got a header of 8192 bytes")
            for kind in b"xgXLK"
        ),
        (
            FILE + 50 * member("x", pax("comment=nothing"), kind=b"x"),
            "8192 bytes of headers for a member, got a header of 512 bytes",
        ),
        (
            b"".join(
                member("g", pax(*(f"k{i}{j}=0123" for j in range(10, 20))), kind=b"g") + FILE
                for i in range(11)
            ),
            "110 extended headers for all members",
        ),
    ],
)
def test_tar_file_that_never_ends_or_takes_long(content: bytes, message: str) -> None:
    with (
        pytest.raises(tarfile.ReadError, match=message),
        open_tar(io.BytesIO(content + FILE + END)) as archive,
    ):
        for _, _ in zip(archive, range(100), strict=False):
            pass
