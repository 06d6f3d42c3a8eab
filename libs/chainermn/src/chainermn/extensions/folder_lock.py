"""Keep two jobs from writing the same files."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path

from chainermn.agreement import run_on_root
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.files import read_json

#: How long rank 0 waits before it says so.
SECONDS_UNTIL_SAID = 2.0
_SECONDS_BETWEEN = 0.1
_FORM = {"host": str, "process": int}


class FolderLock:
    """A lock on the files of one name in a folder, held by rank 0 for all ranks of its job.

    The kernel releases it when the process ends, however it ends. Locks of the same process do
    not exclude each other; the last one releases. The lock file stays, and does no harm.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of all ranks of the job.
    name : str
        What is written. Jobs that write files with different names may share a folder.
    """

    def __init__(self, comm: CommunicatorBase, name: str) -> None:
        self._comm = comm
        self._file_name = f".{name}.lock"
        self._folder: Path | None = None
        self._held: _Held | None = None

    def acquire(self, folder: str | os.PathLike[str], seconds: float = 30.0) -> None:
        """Take the lock, unless it is held already. Collective.

        Parameters
        ----------
        folder : path
            Folder to lock. Each host may have its own; that of rank 0 counts.
        seconds : float
            How long to wait for another job, which may be about to end.

        Raises
        ------
        RuntimeError
            On every rank, if another job still holds the lock. If the folder cannot be locked at
            all, rank 0 only warns.
        """
        folder = Path(folder)
        if folder != self._folder:
            self.release()
            path = folder / self._file_name
            attempts = self._take(path, seconds)
            # One call for each, so that waiting ranks do not look stalled.
            while not run_on_root(self._comm, 0, "locking", lambda: next(attempts)):
                pass
            self._folder = folder

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._folder = self._held = None

    def _take(self, path: Path, seconds: float) -> Iterator[bool]:
        """Try to take the lock, again and again; yield whether this is over."""
        self._held = _HELD.get(path.resolve())
        if self._held is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._held = _HELD[path.resolve()] = yield from _lock(path, seconds)
            except OSError as error:
                warnings.warn(
                    f"{path.parent} cannot be locked ({error}), so make sure that no other job "
                    "writes there",
                    stacklevel=2,
                )
        yield True


class _Held:
    """An open file, which is closed when the last lock on it is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)


# By path, since a file that a process opens twice is locked only once.
_HELD: weakref.WeakValueDictionary[Path, _Held] = weakref.WeakValueDictionary()


def _close_in_child() -> None:
    for held in _HELD.values():
        held.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(path: Path, seconds: float) -> Generator[bool, None, _Held]:
    held = _Held(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))
    start, is_said = time.monotonic(), False
    while not _is_locked(held.descriptor):
        waited = time.monotonic() - start
        if waited >= seconds:
            raise RuntimeError(
                f"another job writes into {path.parent}: {_holder(path)} holds {path.name}. Use "
                "another folder (often --out), or wait until that job has ended, or end it"
            )
        if waited >= SECONDS_UNTIL_SAID and not is_said:
            is_said = True
            print(
                f"chainermn: another job writes into {path.parent}: {_holder(path)}; waiting up "
                f"to {seconds:g} s for it to end",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_SECONDS_BETWEEN)
        yield False
    os.ftruncate(held.descriptor, 0)
    record = {"host": socket.gethostname(), "process": os.getpid()}
    os.pwrite(held.descriptor, json.dumps(record).encode(), 0)
    return held


def _is_locked(descriptor: int) -> bool:
    try:
        # A lock of `lockf` would end when the process has read the file, as a backup does.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        record = read_json(path, _FORM, most=4096)
    except (OSError, ValueError):
        return "its process"
    return f"process {record['process']} on host {record['host']!r}"
