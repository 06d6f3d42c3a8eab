"""Lines of text files."""

import gzip
from collections.abc import Iterator
from pathlib import Path


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, gzipped or not, without the white space around them."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
        yield from (line.strip() for line in lines)
