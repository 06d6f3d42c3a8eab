"""Files that run code when they are unpickled, to test that your scripts do not unpickle them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from chainer_compat.npz import open_npz


class Trap:
    """An object that creates a folder when it is unpickled.

    Parameters
    ----------
    folder : path
        Folder that does not exist. A test asserts that it still does not.
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
    """Write a copy of an NPZ file, such as a snapshot, whose arrays run code when unpickled.

    Use it to test that a script refuses such a file.

    Parameters
    ----------
    source : path
        File that gives the names and shapes of the arrays.
    path : path
        File to write.
    folder : path
        Folder that is created if any of the arrays is unpickled.

    Examples
    --------
    >>> import os
    >>> from chainermn.testing.traps import set_traps
    >>> name = f"trap.{comm.rank}.npz"
    >>> np.savez(name, W=np.zeros(3))
    >>> set_traps(name, name, f"unpickled.{comm.rank}")
    >>> chainer.serializers.load_npz(name, L.Linear(1, nobias=True))
    Traceback (most recent call last):
        ...
    chainer_compat.npz.UnsafeFileError: ...
    >>> os.path.exists(f"unpickled.{comm.rank}")
    False
    """
    trapped: dict[str, Any] = {}
    with open_npz(source) as arrays:
        for key in arrays:
            array = np.full(arrays.header(key).shape, None, object)
            array.flat[:1] = [Trap(folder)]
            trapped[key] = array
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **trapped)
