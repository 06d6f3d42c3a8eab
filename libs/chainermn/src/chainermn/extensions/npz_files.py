"""Write NPZ files, and skip damaged ones on all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from chainer_compat.npz import UnsafeFileError, open_npz
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.files import atomic_write


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write an NPZ file. Even if the process is killed, the old or the new file is complete."""
    with atomic_write(path, "wb") as file:
        # Compressing floats takes more than ten times as long, and saves hardly any space.
        np.savez(file, **arrays)


def find_damage(path: Path) -> str:
    """Read the whole file; return a description of its damage, or ``''``.

    Raises UnsafeFileError if it holds pickles. These are not an accident, so a job must not
    continue without the file.
    """
    try:
        with open_npz(path) as arrays:
            arrays.verify()
    except UnsafeFileError:
        raise
    except OSError as error:
        return str(error).replace(str(path), "it", 1)
    return ""


def is_usable_everywhere(comm: CommunicatorBase, file: str, fault: str) -> bool:
    """Tell whether no rank found a fault in its file; warn on those that did. Collective."""
    if fault:
        warnings.warn(f"skipping {file}: {fault}", stacklevel=3)
    return not any(comm.allgather_obj(fault))
