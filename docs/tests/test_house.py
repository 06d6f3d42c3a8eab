"""The table of modules in "How it is built", the contract about imports, and the files agree."""

from __future__ import annotations

import re
import tomllib

import pages

SOURCE = pages.ROOT / "libs/chainermn/src/chainermn"


def rows() -> list[list[str]]:
    """Return the names in each row of the table, such as ``spans.py`` and ``transport/gpu/``."""
    page = pages.read(pages.DOCS / "design/house.md")
    table = page.partition("\n| module | what is in it |\n|---|---|\n")[2].partition("\n\n")[0]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table.splitlines()]


def test_table_has_each_module_and_folder_once() -> None:
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.glob("*/**/__init__.py")}
    assert sorted(name for row in rows() for name in row) == sorted(modules | folders)


def test_rows_are_the_layers_of_the_contract() -> None:
    settings = tomllib.loads(pages.read(pages.ROOT / "pyproject.toml"))["tool"]["importlinter"]
    (layers,) = (c["layers"] for c in settings["contracts"] if c["id"] == "layers")
    tops = [{re.split("[/.]", name)[0] for name in row} for row in rows()]
    assert tops == [set(re.findall(r"\w+", layer)) for layer in layers]
