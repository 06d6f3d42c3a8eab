"""Lines of text files."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import chainermn.files

# Bytes. A file without line breaks is refused before it fills the memory; attention takes memory
# in proportion to the square of a sentence's length.
LONGEST_LINE, LONGEST_SENTENCE = 1_000_000, 5_000


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines of a file, gzipped or not, without the white space around them.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has a longer line.
    """
    with chainermn.files.open_regular(path) as packed:
        file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
        try:
            for line in chainermn.files.read_lines(file, path, longest):
                yield line.decode(errors="replace").strip()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from None
