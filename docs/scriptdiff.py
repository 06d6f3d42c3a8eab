"""How a script differs from another one, in pieces that can be shown and applied one by one."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

_CONTEXT = 2


@dataclass(frozen=True)
class Piece:
    """Lines that were replaced, between lines that are the same in both scripts."""

    before: tuple[str, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        parts = ((" ", self.before), ("-", self.removed), ("+", self.added), (" ", self.after))
        return "\n".join((sign + line).rstrip() for sign, lines in parts for line in lines)

    def apply(self, text: str) -> str:
        """Return ``text`` with the lines replaced, which must be there exactly once."""
        old = "\n".join((*self.before, *self.removed, *self.after))
        new = "\n".join((*self.before, *self.added, *self.after))
        if text.count(old) != 1:
            raise ValueError(f"expected these lines once, found {text.count(old)} times:\n{old}")
        return text.replace(old, new)


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
