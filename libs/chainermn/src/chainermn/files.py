"""Files that are complete or absent, however a process ends."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the place of another one when the ``with`` block has ended.

    If the block raises, or the process is killed, what was there before stays as it was.

    Parameters
    ----------
    path : path
        Its folder must exist.
    mode : {'w', 'wb'}
        Text is written as UTF-8.

    Raises
    ------
    OSError
        With the name of the file, also if the disk is full.
    """
    path = Path(path)
    # Several may write the same file. Nobody else may have put a link there before.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open(
            mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8"
        ) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno and error.filename is None:  # that of a disk without space
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    # Not every file system can sync a directory; the file itself is safe by now.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
