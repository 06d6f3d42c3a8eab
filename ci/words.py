"""Find phrases to avoid in our English: ``python ci/words.py [FILES]``.

``ci/words.toml`` lists them, each with what to write instead. Without FILES, checks every text
file under version control. Exits with status 1 if a file contains one of the phrases.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES: dict[str, str] = tomllib.loads((ROOT / "ci/words.toml").read_text())["phrases"]
# Files that we did not write, or that list phrases to avoid.
SKIPPED = re.compile(
    r"ci/words\.toml|ci/tests/test_words\.py|ci/constraints/|docs/results/raw/|.*\bLICENSE"
)
# Between two words of a phrase: a space, or the end of a line of prose, of a comment, of a string.
GAP = r"""(?:[ ]|[ ]?["']?[ ]*\n[ ]*(?:\#[ ]|>[ ]|[rf]*["'])?[ ]*)"""


def compiled(phrase: str) -> re.Pattern[str]:
    """Return the expression that finds a phrase, even if it is split between lines."""
    return re.compile(
        r"(?<!\w)(?:" + phrase.replace(" ", GAP) + r")(?!\w)", re.IGNORECASE | re.DOTALL
    )


def findings(text: str, phrases: dict[str, str] = PHRASES) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each phrase to avoid, in order, and what to write instead."""
    found = (
        (match.start(), " ".join(match[0].split()), instead)
        for phrase, instead in phrases.items()
        for match in compiled(phrase).finditer(text)
    )
    for start, words, instead in sorted(found):
        yield text.count("\n", 0, start) + 1, words, instead


def texts_of_git() -> list[str]:
    """Return the names of the text files under version control that we write."""
    command = ["git", "grep", "--files-with-matches", "-I", "--extended-regexp", "."]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if not SKIPPED.match(name)]


def main(names: Iterable[str]) -> int:
    """Print what is found in these files; return the exit code."""
    n_found = 0
    for name in names:
        for line, words, instead in findings((ROOT / name).read_text()):
            print(f"{name}:{line}: {words!r}: write {instead}")
            n_found += 1
    if n_found:
        print(f"{n_found} phrases to rewrite; ci/words.toml lists them", file=sys.stderr)
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or texts_of_git()))
