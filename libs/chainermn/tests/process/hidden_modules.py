"""A folder in which files have the names of Python's modules and of those that people install."""

from __future__ import annotations

import sys
from pathlib import Path

_INSTALLED = {"chainer", "chainer_compat", "chainermn", "click", "mpi4py", "numpy"}


def hide_all_modules(folder: Path) -> Path:
    """Put such files, which fail when they are imported, into a folder, and return it."""
    for name in sys.stdlib_module_names | _INSTALLED:
        (folder / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    return folder
