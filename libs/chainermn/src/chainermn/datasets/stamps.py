"""Stamps of files: what is made of a file is used only while the file stays the same.

An index of a file holds positions in it. If somebody writes to the file, they lead to other lines:
nothing fails, and a training only gets worse.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from chainermn.datasets.names import shown
from chainermn.files import open_regular

__all__ = ["Stamp"]


@dataclass(frozen=True)
class Stamp:
    """A file as it was when something was made of it, such as an index.

    Attributes
    ----------
    path : Path
    size : int
        Size in bytes.
    time : int
        Time of the last change, in nanoseconds.
    digest : str
        SHA-256 of the content.

    Examples
    --------
    >>> from pathlib import Path
    >>> from chainermn.datasets.stamps import Stamp
    >>> if comm.rank == 0:
    ...     n = Path("words.txt").write_text("a few words")
    ...     stamp = Stamp.of(Path("words.txt"))
    ...     n = Path("words.txt").write_text("other words")
    ...     stamp.check()
    Traceback (most recent call last):
    ValueError: words.txt has changed since the index was made: ...
    """

    path: Path
    size: int
    time: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Read a whole file, and return its stamp. This takes about a second per gigabyte.

        Raises
        ------
        OSError, ValueError
            If the file cannot be read, is a pipe or a device, or changes while it is read.
        """
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            found = hashlib.file_digest(cast(io.BufferedReader, file), "sha256")
            stamp = cls(path, status.st_size, status.st_mtime_ns, found.hexdigest())
            stamp.check(file)
        return stamp

    def check(self, file: BinaryIO | None = None) -> None:
        """Raise if size or time are others. This takes a microsecond.

        Parameters
        ----------
        file : binary file, optional
            File from `open`. Without it, whatever file has the path now is checked.

        Raises
        ------
        OSError
            If there is no file any more, or it cannot be read.
        ValueError
            If it has changed.
        """
        try:
            status = self.path.stat() if file is None else os.fstat(file.fileno())
        except OSError as error:
            raise self.explain(error) from None
        if not self._fits(status):
            found = f"{self.size} bytes, now {status.st_size}"
            if status.st_size == self.size:
                found = "written to, though as long as it was"
            raise ValueError(
                f"{shown(self.path)} has changed since the index was made ({found}): start again, "
                "and then leave the file as it is while a job reads it"
            )

    def open(self) -> BinaryIO:
        """Open the file for reading bytes; this raises as `check` does."""
        try:
            file = open_regular(self.path)
        except OSError as error:
            raise self.explain(error) from None
        try:
            self.check(file)
        except BaseException:
            file.close()
            raise
        return file

    def of_this_host(self) -> Stamp:
        """Return the stamp of this host's copy, which may have been written at another time.

        Raises
        ------
        OSError
            If there is none, or it cannot be read.
        ValueError
            If it has other content.
        """
        status = self.path.stat()
        if self._fits(status):
            return self
        own = Stamp.of(self.path) if status.st_size == self.size else None
        if own is None or own.digest != self.digest:
            path = shown(self.path)
            raise ValueError(f"{path} is not the same file on all hosts: copy that of rank 0")
        return own

    def explain(self, error: OSError) -> OSError:
        """Return an error from reading the file, with its name and, if it is gone, what to do."""
        if isinstance(error, FileNotFoundError):
            gone = "gone since the index was made: put it back, and start again"
            return FileNotFoundError(errno.ENOENT, gone, str(self.path))
        error.filename = error.filename or str(self.path)
        return error

    def _fits(self, status: os.stat_result) -> bool:
        return (status.st_size, status.st_mtime_ns) == (self.size, self.time)
