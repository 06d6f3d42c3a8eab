"""A stamp tells whether a file is still what it was."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from chainermn.datasets.stamps import Stamp


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"some words\n")
    return path


def test_stamp_of_a_file(path):
    stamp = Stamp.of(path)
    assert (stamp.path, stamp.size, stamp.time) == (path, 11, path.stat().st_mtime_ns)
    assert stamp.digest == hashlib.sha256(b"some words\n").hexdigest()
    stamp.check()
    with stamp.open() as file:
        assert file.read() == b"some words\n"


def test_file_that_changes_while_it_is_read(path, monkeypatch):
    read = hashlib.file_digest

    def read_and_change(*args):
        path.write_bytes(b"something else\n")
        return read(*args)

    monkeypatch.setattr(hashlib, "file_digest", read_and_change)
    with pytest.raises(ValueError, match="has changed since the index was made"):
        Stamp.of(path)


def test_names_that_are_not_utf8_are_shown_so_that_they_can_be_printed(tmp_path):
    path = tmp_path / os.fsdecode(b"z\xfcrich")
    path.write_bytes(b"some words\n")
    stamp = Stamp.of(path)
    path.write_bytes(b"more\n")
    for act in (stamp.check, stamp.of_this_host):
        with pytest.raises(ValueError) as caught:
            act()
        assert str(caught.value).startswith(ascii(str(path)))


def test_file_that_is_replaced_or_removed(path):
    """Who has it open can still read it; who looks for it learns of it."""
    stamp = Stamp.of(path)
    with stamp.open() as file:
        path.rename(path.with_name("old"))
        gone = f"[Errno 2] gone since the index was made: put it back, and start again: '{path}'"
        for act in (stamp.check, stamp.open):
            with pytest.raises(FileNotFoundError, match=re.escape(gone)):
                act()
        path.write_bytes(b"other words, and more\n")
        changed = f"{path} has changed since the index was made .11 bytes, now 22.: start"
        for act in (stamp.check, stamp.open):
            with pytest.raises(ValueError, match=changed):
                act()
        stamp.check(file)


def test_copy_on_another_host(path):
    stamp = Stamp.of(path)
    assert stamp.of_this_host() is stamp
    os.utime(path, (0, 0))
    own = stamp.of_this_host()
    assert (own.time, own.digest) == (0, stamp.digest)
    own.check()
    for content in (b"Some words\n", b"more words than there were\n"):
        path.write_bytes(content)
        os.utime(path, (1, 1))
        with pytest.raises(ValueError, match=f"{path} is not the same file on all hosts: copy"):
            stamp.of_this_host()


def test_errors_of_network_disks_name_the_file(path):
    stamp = Stamp.of(path)
    file = stamp.open()
    os.close(file.fileno())
    with pytest.raises(OSError, match=f"Bad file descriptor: '{path}'"):
        stamp.check(file)
    with pytest.raises(OSError):
        file.close()
