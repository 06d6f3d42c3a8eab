"""Find files that an app opens by itself: ``python ci/intake.py [FILES]``.

Files of users are read by the library, which refuses what would spoil a training and names the
file: `chainermn.files` and the modules of `chainermn.datasets`. Apps may write files, and read by
`numpy.load` and `numpy.loadtxt` what they wrote or what a package brings. Without FILES, checks
all modules of apps/ except tests. Exits with status 1 if a file has such a call.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES_THAT_WRITE = {"w", "x", "a", "wb", "xb", "ab"}
READERS = {"open", "read_bytes", "read_text", "imread", "fromfile", "genfromtxt", "memmap"}
READERS.add("splitlines")  # which splits at more than line ends


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of what opens files to read them, or splits lines."""
    allowed: set[ast.AST] = set()
    ours: set[str] = set()
    for node in ast.walk(ast.parse(source)):  # a call before the function that it calls
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("chainermn"):
                ours |= {alias.asname or alias.name for alias in node.names}
            case ast.ImportFrom(names=names) if found := READERS & {alias.name for alias in names}:
                yield from ((node.lineno, f"{node.module}.{name}") for name in sorted(found))
            case ast.Call() if writes(node):
                allowed.add(node.func)
            case ast.Attribute(value=ast.Name(name)) if name in ours:
                pass
            case ast.Name("open" as name) | ast.Attribute(attr=name):
                if name in READERS and node not in allowed:
                    yield node.lineno, ast.unparse(node)


def writes(call: ast.Call) -> bool:
    """Tell whether a call has a mode that writes, as an argument or by name.

    The first argument may be one only if a method is called, as in ``path.open("w")``.
    """
    keywords = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    given = [*call.args[isinstance(call.func, ast.Name) : 2], *keywords]
    modes = [argument.value for argument in given if isinstance(argument, ast.Constant)]
    return not MODES_THAT_WRITE.isdisjoint(modes)


def main(names: Iterable[str]) -> int:
    """Print what is found in these files; return the exit code."""
    n_found = 0
    for name in names:
        for line, what in findings((ROOT / name).read_text()):
            print(f"{name}:{line}: {what}: let chainermn.files or chainermn.datasets read it")
            n_found += 1
    return int(n_found > 0)


def modules_of_apps() -> list[str]:
    """Return the names of the apps' modules, without tests and what only tests use."""
    found = (path.relative_to(ROOT) for path in (ROOT / "apps").rglob("*.py"))
    return sorted(
        str(path)
        for path in found
        if len(path.parts) > 2 and path.name != "conftest.py" and not path.name.startswith("test_")
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or modules_of_apps()))
