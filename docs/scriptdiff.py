"""How a script differs from another one, in pieces that can be shown and applied one by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape

#: The class of what is seen, and left out by the button that copies.
ONLY_SEEN = "only-seen"
_CONTEXT = 2


@dataclass(frozen=True)
class Piece:
    """Lines that were replaced, between lines that are the same in both scripts."""

    before: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    after: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Return ``text`` with the lines replaced, which must be there exactly once."""
        new = "\n".join((*self.before, *self.added, *self.after))
        self._begin(text)
        return text.replace(self._old(), new)

    def place(self, text: str) -> str:
        """Return where in ``text`` the piece belongs: the lines it shows, and their function."""
        first = text[: self._begin(text)].count("\n") + 1
        last = first + self._old().count("\n")
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        changed = first + len(self.before)
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        around = [f.name for f in functions if f.lineno <= changed <= (f.end_lineno or 0)]
        return ", ".join([lines, *(f"in {name}()" for name in around)])

    def html(self) -> str:
        """Return the lines with their signs; readers can copy only the added lines."""
        return "".join(
            (
                *(_seen(f" {line}\n") for line in self.before),
                *(_seen(f"-{line}\n", "gd") for line in self.removed),
                *(f'<span class="gi">{_seen("+")}{escape(line)}\n</span>' for line in self.added),
                *(_seen(f" {line}\n") for line in self.after),
            )
        )

    def _old(self) -> str:
        return "\n".join((*self.before, *self.removed, *self.after))

    def _begin(self, text: str) -> int:
        old = self._old()
        if text.count(old) != 1:
            raise ValueError(f"expected these lines once, found {text.count(old)} times:\n{old}")
        return text.index(old)


def _seen(text: str, *classes: str) -> str:
    return f'<span class="{" ".join((ONLY_SEEN, *classes))}">{escape(text)}</span>'


def pieces(old: str, new: str) -> list[Piece]:
    """Return what makes ``new`` of ``old``."""
    a, b = old.splitlines(), new.splitlines()
    operations = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    found = []
    for index, (kind, i1, i2, j1, j2) in enumerate(operations):
        if kind == "equal":
            continue
        previous = operations[index - 1][1] if index else 0
        following = operations[index + 1][2] if index + 1 < len(operations) else len(a)
        before = a[max(previous, i1 - _CONTEXT) : i1]
        after = a[i2 : min(following, i2 + _CONTEXT)]
        found.append(Piece(tuple(before), tuple(a[i1:i2]), tuple(b[j1:j2]), tuple(after)))
    return found


def select(found: list[Piece], text: str) -> Piece:
    """Return the one piece that adds a line with ``text``."""
    selected = [piece for piece in found if any(text in line for line in piece.added)]
    if len(selected) != 1:
        raise ValueError(f"expected one difference that adds {text!r}, found {len(selected)}")
    return selected[0]


def shown(page: str) -> list[str]:
    """Return the texts with which a page selects the pieces it shows, from top to bottom."""
    bodies = re.findall(r"```\{script-diff\}[^\n]*\n(.*?)```", page, re.DOTALL)
    return [line for body in bodies for line in body.splitlines()]


def walk(old: str, new: str, texts: Iterable[str]) -> Iterator[tuple[str, Piece, str]]:
    """Yield each text, its piece, and the script to which the pieces before it were applied."""
    found = pieces(old, new)
    for text in texts:
        piece = select(found, text)
        yield text, piece, old
        old = piece.apply(old)
