"""The blocks of code on the pages, and the marks that say how to run each.

A comment ``<!-- run: 2 ranks -->``, ``<!-- run: mpiexec -->``, ``<!-- run: here -->``,
``<!-- run: clean -->``, ``<!-- run: tutorial -->``, ``<!-- run: two hosts -->`` (run by
ci/multinode) or ``<!-- not run: REASON -->`` stands right before a block. ``<!-- prints -->``
before a block of text says that the preceding block prints this text, its lines in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES = sorted(
    page
    for page in DOCS.rglob("*.md")
    if "results" not in page.parts and "tests" not in page.parts
)
#: Pages that are read outside the site.
READMES = sorted(
    file
    for pattern in ("*.md", "[!.]*/*.md", "libs/*/*.md", "apps/*/*.md")
    for file in ROOT.glob(pattern)
    if file.parent != DOCS
)
#: Languages that cannot be run.
NOT_CODE = ("text", "diff", "csv")

#: What a reader of the tutorial does: changes a script, runs commands.
_TO_DO = re.compile(
    r"""^```diff\n(?P<change>.*?)^```$
    | ^<!--\ run:\ tutorial\ -->\n```sh\n(?P<commands>.*?)^```$""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_FENCE = re.compile(r"( *)(`{3,})([\w{-]*)\}? *(.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS)}:{self.line}"


def read(page: Path) -> str:
    """Return the text of a page, whatever encoding this machine prefers."""
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page, from top to bottom."""
    lines = read(page).splitlines()
    numbers = iter(range(len(lines)))
    for start in numbers:
        fence = _FENCE.fullmatch(lines[start])
        if not fence:
            continue
        indent, ticks, kind, argument = fence.groups()
        end = next(n for n in numbers if lines[n].strip() == ticks)
        if kind.startswith("{") and kind != "{code-block":
            continue
        body = [line.removeprefix(indent) for line in lines[start + 1 : end]]
        while body and re.match(r":[\w-]+:", body[0]):  # options of a directive
            del body[0]
        above = lines[start - 1].strip()
        comment = re.fullmatch("<!-- (.+) -->", above)
        mark = comment[1] if comment else ""
        text = "\n".join(body).strip("\n") + "\n"
        yield Block(page, start + 1, argument if kind.startswith("{") else kind, mark, text)


def tutorial() -> Iterator[tuple[Path, str, str]]:
    """Yield what a reader of the tutorial does, from the first page to the last.

    Each is a tuple: the page, ``change`` or ``run``, and the difference or the commands.
    """
    for page in (DOCS / "tutorial/index.md", *sorted(DOCS.glob("tutorial/step*.md"))):
        for found in _TO_DO.finditer(read(page)):
            kind = "change" if found["change"] else "run"
            yield page, kind, found["change"] or found["commands"]


def all_blocks() -> list[Block]:
    """Return the blocks of code of all pages."""
    return [block for page in PAGES for block in blocks(page)]


def marked(mark: str) -> list[Block]:
    """Return the blocks whose mark matches the pattern ``mark``."""
    return [block for block in all_blocks() if re.fullmatch(mark, block.mark)]


def in_language(language: str) -> list[Block]:
    """Return the blocks in a language."""
    return [block for block in all_blocks() if block.language == language]


def printed_by(block: Block) -> list[str] | None:
    """Return the lines that a block is said to print, sorted; None if nothing is said."""
    following = [other for other in blocks(block.page) if other.line > block.line][:1]
    if following and following[0].mark == "prints":
        return sorted(following[0].text.splitlines())
    return None
