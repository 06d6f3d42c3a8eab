"""Modules with the same names in several folders."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from chainermn.testing.modules import import_modules, modules_of


def write(folder: Path, value: int) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "parts/__init__.py").touch()
    (folder / "parts/inner.py").write_text(f"value = {value}\n")
    (folder / "outer.py").write_text("from parts.inner import value\n")
    return folder


def test_each_folder_has_its_own(tmp_path: Path) -> None:
    before = dict(sys.modules), sys.path[:]
    found = [
        import_modules(write(tmp_path / name, value), ["outer", "parts.inner"])
        for name, value in (("one", 1), ("two", 2))
    ]
    assert [(each.outer.value, each.parts_inner.value) for each in found] == [(1, 1), (2, 2)]
    assert (dict(sys.modules), sys.path) == before


def test_pickle_finds_the_classes_until_the_end(tmp_path: Path) -> None:
    (write(tmp_path / "one", 1) / "kinds.py").write_text("class Kind:\n    pass\n")
    with modules_of(tmp_path / "one", ["kinds"]) as modules:
        pickled = pickle.dumps(modules.kinds.Kind())
        assert isinstance(pickle.loads(pickled), modules.kinds.Kind)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(pickled)


def test_everything_is_as_before_where_a_module_fails(tmp_path: Path) -> None:
    (write(tmp_path / "one", 1) / "broken.py").write_text("import outer\n1 / 0\n")
    before = dict(sys.modules), sys.path[:]
    with pytest.raises(ZeroDivisionError):
        import_modules(tmp_path / "one", ["broken"])
    assert (dict(sys.modules), sys.path) == before
