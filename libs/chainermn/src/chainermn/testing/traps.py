"""Files that run code when they are unpickled: no script of yours should fall for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from chainer_compat.npz import open_npz


class Trap:
    """Makes a folder when it is unpickled.

    Parameters
    ----------
    folder : path
        Must not exist yet. A test asserts that it still does not.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def set_traps(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
) -> None:
    """Write a copy of an NPZ file, such as a snapshot, in which a trap is in each array.

    Parameters
    ----------
    source : path
        Arrays have the names and shapes of those in this file.
    path : path
        The file to write.
    folder : path
        Is made when any of the arrays is unpickled.
    """
    trapped: dict[str, Any] = {}
    with open_npz(source) as arrays:
        for key in arrays:
            array = np.full(arrays.header(key).shape, None, object)
            array.flat[:1] = [Trap(folder)]
            trapped[key] = array
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **trapped)
