"""Find phrases that our English avoids: ``python ci/words.py [FILES]``, by default all of git's.

``ci/words.toml`` has them, each with what to write instead. Exits with 1 if a file has one.
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
# Licenses and names of releases are not ours to write, and notebooks hold pictures.
SKIPPED = re.compile(
    r"^(ci/words\.toml|ci/tests/test_words\.py|ci/constraints/.*|docs/results/raw/.*|.*/LICENSE.*)$"
)
SUFFIXES = {
    "",
    ".cfg",
    ".css",
    ".ipynb",
    ".js",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}
# Between two words of a phrase: a space, or the end of a line of prose, of a comment, of a string.
GAP = r"""(?:[ ]|[ ]?["']?[ ]*\n[ ]*(?:\#[ ]|>[ ]|[rf]*["'])?[ ]*)"""


def compiled(phrase: str) -> re.Pattern[str]:
    """Return the expression that finds a phrase, also where it is divided between lines."""
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


def files_of_git() -> list[str]:
    """Return the names of the files that are under version control."""
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.splitlines()


def main(names: Iterable[str]) -> int:
    """Print what is found in these files, and return how the process ends."""
    n_found = 0
    for name in names:
        if SKIPPED.match(name) or Path(name).suffix not in SUFFIXES:
            continue
        for line, words, instead in findings((ROOT / name).read_text()):
            print(f"{name}:{line}: {words!r}: write {instead}")
            n_found += 1
    if n_found:
        print(f"{n_found} phrases to rewrite; ci/words.toml lists them", file=sys.stderr)
    return int(n_found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or files_of_git()))
