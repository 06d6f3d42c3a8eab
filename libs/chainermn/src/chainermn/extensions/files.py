"""Write files that are complete or absent, and skip damaged ones on all ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write an NPZ file. Even if the process is killed, the old or the new file is complete."""
    replace_atomically(path, lambda file: np.savez_compressed(file, **arrays))


def replace_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a new file that takes the place of the old one when it is complete."""
    # With the number of the process: several may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # that of a disk without space
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


def find_damage(path: Path) -> str:
    """Read the whole file; return a description of its damage, or ``''``."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # zipfile, zlib and struct each raise their own
        return f"{type(error).__name__}: {error}"
    return f"wrong checksum of {broken}" if broken else ""


def is_usable_everywhere(comm: CommunicatorBase, file: str, fault: str) -> bool:
    """Tell whether no rank found a fault in its file; warn on those that did. Collective."""
    if fault:
        warnings.warn(f"skipping {file}: {fault}", stacklevel=3)
    return not any(comm.allgather_obj(fault))
