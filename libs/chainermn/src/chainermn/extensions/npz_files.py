"""Files of NumPy arrays that are complete or not there."""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def write_atomically(path: Path, arrays: dict[str, Any]) -> None:
    """Write an NPZ file: a process that is killed at any time leaves the old file or the new one.

    Parameters
    ----------
    path : Path
        In an existing directory.
    arrays : dict
        From `chainer.serializers.npz.serialize`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def find_damage(path: Path) -> str:
    """Read the whole file; return what is wrong with it, or ``''``."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # zipfile, zlib and struct each have their own
        return f"{type(error).__name__}: {error}"
    return f"wrong checksum of {broken}" if broken else ""


def _sync_directory(path: Path) -> None:
    # Not every file system can; the file itself is safe by then.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
