"""Differences between scripts, as HTML that shows signs and lets readers copy the added lines."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: Class of text that is seen, but that the copy button leaves out.
ONLY_SEEN = "only-seen"


def block(difference: str) -> str:
    """Return a difference as Sphinx shows code. Its first line is the caption: ``@@ place @@``."""
    place, *lines = difference.splitlines()
    caption = f'<span class="caption-text">{escape(place.strip("@ "))}</span>'
    return (
        '<div class="literal-block-wrapper docutils container">'
        f'<div class="code-block-caption">{caption}</div>'
        '<div class="highlight-diff"><div class="highlight">'
        f"<pre>{inside(lines)}</pre></div></div></div>"
    )


def inside(lines: Iterable[str]) -> str:
    """Return the lines with their signs; readers can copy only the added lines."""
    return "".join(map(_signed, lines))


def _signed(line: str) -> str:
    if line.startswith("+"):
        return f'<span class="gi">{_seen("+")}{escape(line[1:])}\n</span>'
    # Editors remove the space of an empty line.
    return _seen(f"{line or ' '}\n", *(["gd"] if line.startswith("-") else []))


def _seen(text: str, *classes: str) -> str:
    return f'<span class="{" ".join((ONLY_SEEN, *classes))}">{escape(text)}</span>'
