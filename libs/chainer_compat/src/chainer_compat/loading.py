"""The finder's work once a program imports Chainer or ChainerMN."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Folder for the package in chainermn's wheel, since `site-packages/chainermn` belongs to Chainer.
CHAINERMN_FOLDER = "_chainermn_dist"


def find_chainermn() -> ModuleSpec | None:
    """Find the first ``chainermn`` on ``sys.path`` that is not Chainer's own copy.

    Chainer's copy is the one beside a ``chainer`` package. Our wheel is in the folder
    ``_chainermn_dist`` of a directory on the path; our editable install is in a source folder that
    is itself on the path.

    Returns
    -------
    ModuleSpec or None
        None if there is only Chainer's copy, or none at all; then Python searches as usual.
    """
    for entry in sys.path:
        for folder in (entry, os.path.join(entry, CHAINERMN_FOLDER)):
            if not os.path.isfile(os.path.join(folder, "chainermn", "__init__.py")):
                continue
            if not os.path.isdir(os.path.join(folder, "chainer")):
                return PathFinder.find_spec("chainermn", [folder or os.getcwd()])
    return None


def repaired_modules() -> frozenset[str]:
    """Return the names of Chainer's modules in the tables of repairs."""
    from chainer_compat.registry import all_repairs

    return frozenset(repair.module for repair in all_repairs())


def find_ideep4py(
    us: object, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Find the real module ``ideep4py``, or that of ``chainer_fast`` if there is none."""
    name = "ideep4py"
    fast = importlib.util.find_spec("chainer_fast")
    folders = fast.submodule_search_locations or () if fast else ()
    ours = [os.path.join(folder, "stand_ins") for folder in folders]
    return _find(us, name, path, target) or PathFinder.find_spec(name, ours)


def find_repaired(
    us: object, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Let the other finders find a module of Chainer, and wrap the loader that they return."""
    spec = _find(us, fullname, path, target)
    if spec is not None and spec.loader is not None:
        spec.loader = RepairingLoader(spec.loader)
    return spec


def _find(
    us: object, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the other finders."""
    for finder in sys.meta_path:
        if finder is not us:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


class RepairingLoader(Loader):
    """Executes a module with another loader, and applies the repairs that it needs."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the original loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, with its repairs before, after or instead of its own code.

        Raises
        ------
        RuntimeError
            If a repair fails. The message names the repair and says how to skip it.
        """
        from chainer_compat.registry import apply_repairs

        # From here on, the module looks as if it had been imported without us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if not apply_repairs(module, "instead"):
            apply_repairs(module, "before")
            self._loader.exec_module(module)
            apply_repairs(module, "after")
