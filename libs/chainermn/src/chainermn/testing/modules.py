"""Import the modules of a folder, such as an app, even if other modules have the same names."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace


@contextlib.contextmanager
def modules_of(folder: Path, names: Iterable[str] = ()) -> Iterator[SimpleNamespace]:
    """Import modules of a folder; other folders may have modules with the same names.

    During the ``with`` block, the modules of this folder are found by their plain names: they can
    import each other, and pickle finds their classes. Afterwards, `sys.modules` and `sys.path`
    are as before.

    Parameters
    ----------
    folder : Path
        Folder of the modules.
    names : iterable of str
        Names such as ``"data"`` or ``"models.lstm"``.

    Yields
    ------
    SimpleNamespace
        Modules by their names, in which a dot becomes an underscore.
    """
    own = {path.stem for path in folder.iterdir()}

    def take_away() -> dict[str, ModuleType]:
        return {n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] in own}

    others = take_away()
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(
            **{name.replace(".", "_"): importlib.import_module(name) for name in names}
        )
    finally:
        sys.path.remove(str(folder))
        take_away()
        sys.modules.update(others)


def import_modules(folder: Path, names: Iterable[str]) -> SimpleNamespace:
    """Import modules as `modules_of` does, and return them."""
    with modules_of(folder, names) as modules:
        return modules
