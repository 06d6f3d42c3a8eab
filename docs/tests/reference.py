"""What the API reference shows: the objects that the directives on its pages name."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import pages

API = pages.DOCS / "api"
_DIRECTIVE = re.compile(
    r"^\.\. (?P<kind>auto\w+|py:\w+):: (?P<path>[\w.]+).*\n(?P<options>(?:   .+\n)*)",
    re.MULTILINE,
)


def directives() -> Iterator[re.Match[str]]:
    """Yield the directives of all pages; the groups are ``kind``, ``path`` and ``options``."""
    for page in sorted(API.glob("*.md")):
        yield from _DIRECTIVE.finditer(pages.read(page))


def named(path: str) -> object:
    """Import and return the module, or the object in a module, with this dotted name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def callables() -> dict[str, object]:
    """Return the functions and classes of the reference, by the names that it shows.

    Methods count as functions if their class is shown with those that it inherits.
    """
    found: dict[str, object] = {}
    for kind, path, options in (directive.groups() for directive in directives()):
        if kind in ("autofunction", "autoclass"):
            found[path] = named(path)
        if kind == "automodule" and ":no-members:" not in options:
            module = importlib.import_module(path)
            parts = inspect.getmembers(module, inspect.isfunction)
            found |= {
                f"{path}.{name}": function
                for name, function in parts
                if function.__module__ == path and not name.startswith("_")
            }
        if ":inherited-members:" in options:
            left_out = re.findall(r"\w+", options.partition(":exclude-members:")[2])
            parts = inspect.getmembers(found[path], inspect.isfunction)
            found |= {
                f"{path}.{name}": method
                for name, method in parts
                if name not in left_out and not name.startswith("_")
            }
    return found
