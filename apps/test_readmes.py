"""What the READMEs tell people to edit is there."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

APPS = Path(__file__).resolve().parent
NAMES = sorted(path.parent.name for path in APPS.glob("*/train.py"))

# `load` and `CLASSES` in `data.py`
PLACES = re.compile(r"((?:`[^`]+`(?:,| and) )*`[^`]+`) in `([^`]+\.py)`")


def table(app: str) -> str:
    """Return the table of what to edit in an app."""
    readme = (APPS / app / "README.md").read_text(encoding="utf-8")
    return readme.partition("| I want to | Edit these lines |\n")[2].partition("\n\n")[0]


def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield what a module, or a class in it, defines: ``load``, ``CLASSES``, ``Images.get``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from names(node.body, f"{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            yield from (n.id for n in stored if isinstance(n.ctx, ast.Store))


@functools.cache
def read(path: Path) -> tuple[str, set[str]]:
    """Return the source of a module, and the names that it defines."""
    source = path.read_text(encoding="utf-8")
    return source, set(names(ast.parse(source).body))


@pytest.mark.parametrize("app", NAMES)
def test_places_to_edit_are_there(app):
    """Each is a name that the file defines, or code that it has in one place only."""
    rows = table(app).splitlines()[1:]
    missing = []
    for row in rows:
        places = PLACES.findall(row)
        assert places, row
        assert len(re.findall(r"`[^`]+\.py`", row)) == len(places), row
        for pieces, file in places:
            source, defined = read(APPS / app / file)
            for piece in re.findall("`([^`]+)`", pieces):
                is_name = re.fullmatch(r"\w+(\.\w+)?", piece)
                if not (piece in defined if is_name else source.count(piece) == 1):
                    missing.append(f"{piece} in {file}")
    assert len(rows) >= 5
    assert missing == []


def test_list_names_every_app():
    listed = re.findall(r"\]\((\w+)/README\.md\)", (APPS / "README.md").read_text("utf-8"))
    assert sorted(listed) == NAMES
