"""Files that are complete or absent: what is left when writing one fails."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from chainermn.files import atomic_write

KILLED = """
import os, signal, sys
from chainermn.files import atomic_write

with atomic_write(sys.argv[1]) as file:
    file.write("new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


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
