"""A corpus: two files of parallel text, read from disk line by line, and their vocabularies."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from chainer.dataset import DatasetMixin

import chainermn
import generated
from chainermn.agreement import run_on_root, run_together
from chainermn.files import atomic_write, open_regular, read_json
from files import LONGEST_LINE
from index import SOURCE_AT, TARGET_AT, build_index
from subwords import Subwords
from vocabulary import Vocabulary, most_frequent, tokenize

N_GENERATED = 21000
WHERE = "input"  # in messages
# Text compresses to about a tenth. More than a gigabyte compressed to a hundredth is refused.
SMALL, MOST_TIMES = 1 << 30, 100
# Form of the JSON in the cache.
CACHED = {"about": dict, "vocabularies": ([str], [str]), "index": str, "skipped": {str: int}}

Files = tuple[Path, Path]  # of the source and of the target


@dataclass
class Settings:
    """Settings that decide how a corpus is made from its files.

    Attributes
    ----------
    min_count, max_size : int
        Least count of a token, and largest size, of the vocabularies.
    max_length : int
        Number of tokens; pairs with more on one side are skipped.
    share : bool
        Whether to make one vocabulary for both languages.
    subwords : bytes or None
        Model of `subwords.Subwords`; without it, tokens are words.
    """

    min_count: int = 1
    max_size: int = 30000
    max_length: int = 50
    share: bool = False
    subwords: bytes | None = None

    def splitter(self) -> Callable[[str], list[str]]:
        """Return what divides lines into tokens."""
        return tokenize if self.subwords is None else Subwords(self.subwords)


@dataclass
class Corpus:
    """What all ranks know about a corpus.

    Attributes
    ----------
    files : tuple of Path
        Lines in UTF-8, line for line translations of each other.
    vocabularies : tuple of Vocabulary
        Of the source and of the target.
    n_pairs : int
        Number of usable pairs of lines.
    index_digest : str
        Digest of the index.
    skipped : dict
        Number of unusable pairs, by reason.
    settings : Settings
    """

    files: Files
    vocabularies: tuple[Vocabulary, Vocabulary]
    n_pairs: int
    index_digest: str
    skipped: dict[str, int]
    settings: Settings

    def digest(self) -> str:
        """Return a digest of this corpus."""
        tokens = [vocabulary.tokens for vocabulary in self.vocabularies]
        content = [tokens, self.index_digest, self.skipped, _describe(self.settings)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_corpus(
    files: Files | None,
    cache: Path,
    settings: Settings,
    seed: int,
    comm: chainermn.CommunicatorBase,
) -> tuple[Corpus, np.ndarray | None]:
    """Prepare the training corpus for every rank. Collective.

    Parameters
    ----------
    files : tuple of Path or None
        Source and target, which may be gzipped; None stands for those that `generated` writes.
    cache : Path
        Folder for what is generated or unpacked, for the index and the vocabularies. Hosts that
        do not see that of rank 0 write their own.
    settings : Settings
    seed : int
        Seed of the generated text.
    comm : CommunicatorBase

    Returns
    -------
    corpus : Corpus
    index : array of int64, shape (pairs, 4), or None
        On rank 0, a memory map; see `index` for its columns.

    Raises
    ------
    OSError, RuntimeError, ValueError
        On every rank, if the files cannot be used.
    """

    def find_files() -> Files:
        if files is not None:
            return _unpack(files, cache)
        stem = cache.resolve() / f"dates-{seed}"
        paths = stem.with_suffix(".source"), stem.with_suffix(".target")
        if not all(path.exists() for path in paths):
            generated.write(*paths, N_GENERATED, seed)
        return paths

    return _load(find_files, lambda paths: _prepare(paths, cache, settings), cache, comm)


def load_more(
    files: Files, cache: Path, corpus: Corpus, comm: chainermn.CommunicatorBase
) -> tuple[Corpus, np.ndarray | None]:
    """Prepare another corpus, with the vocabularies and settings of the first. Collective.

    Parameters, return values and exceptions are those of `load_corpus`.
    """

    def prepare(paths: Files) -> tuple[Corpus, np.ndarray]:
        max_length, split = corpus.settings.max_length, corpus.vocabularies[0].split
        index, _, skipped = build_index(*paths, max_length, split)
        return replace(corpus, files=paths, n_pairs=len(index), skipped=skipped), index

    return _load(lambda: _unpack(files, cache), prepare, cache, comm)


def _load(
    find_files: Callable[[], Files],
    prepare: Callable[[Files], tuple[Corpus, np.ndarray]],
    cache: Path,
    comm: chainermn.CommunicatorBase,
) -> tuple[Corpus, np.ndarray | None]:
    def find() -> Files:
        cache.mkdir(parents=True, exist_ok=True)
        return find_files()

    # Rank 0 for all ranks, then the first rank of each host, unless it is already done there.
    paths = run_on_root(comm, 0, WHERE, find)
    run_together(comm, WHERE, lambda: find() if comm.intra_rank == 0 else None)
    index: np.ndarray | None = None

    def prepare_once() -> tuple[Corpus, list[int]]:
        nonlocal index
        corpus, index = prepare(paths)
        return corpus, [path.stat().st_size for path in paths]

    corpus, sizes = run_on_root(comm, 0, WHERE, prepare_once)

    def check_files() -> None:
        for path, size in zip(paths, sizes, strict=True):
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} is not the same file on all hosts")

    run_together(comm, WHERE, check_files)
    return corpus, index


def _unpack(files: Files, cache: Path) -> Files:
    """Return files with the same lines, with random access."""
    return _unpacked(files[0], cache), _unpacked(files[1], cache)


def _unpacked(path: Path, cache: Path) -> Path:
    """Return a file with the lines of ``path``, with random access."""
    path = path.resolve()
    if path.suffix != ".gz":
        open_regular(path).close()  # raises if it cannot be read
        return path
    with open_regular(path) as packed:
        # A checksum of the lines at the end. Modification times would differ between hosts.
        packed.seek(-min(8, path.stat().st_size), os.SEEK_END)
        mark = packed.read().hex()
    unpacked = cache.resolve() / f"{mark}-{path.stem}"
    if not unpacked.exists():
        try:
            with gzip.open(path) as packed, atomic_write(unpacked, "wb") as lines:
                _copy_text(packed, lines, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from None
    return unpacked


def _copy_text(packed: BinaryIO, lines: BinaryIO, path: Path) -> None:
    """Copy the content of a gzip file, unless it seems made to fill the disk."""
    n_lines, most = 0, max(SMALL, MOST_TIMES * path.stat().st_size)
    while chunk := packed.read(LONGEST_LINE + 1):
        if len(chunk) > LONGEST_LINE and b"\n" not in chunk:
            where = f"{path}:{n_lines + 1}"
            raise ValueError(f"{where}: expected a line of at most {LONGEST_LINE} bytes")
        n_lines += chunk.count(b"\n")
        lines.write(chunk)
        if lines.tell() > most:
            raise ValueError(
                f"{path}: more than {most} bytes are in it: no text is packed so well"
            )


def _prepare(files: Files, cache: Path, settings: Settings) -> tuple[Corpus, np.ndarray]:
    """Index two files and make their vocabularies, or take both from the cache."""
    stats = [(path, path.stat()) for path in files]
    about = {
        "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        **_describe(settings),
    }
    # Jobs with other files or settings may use the same folder.
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    described, rows = cache / f"vocabulary-{key}.json", cache / f"index-{key}.npy"
    if described.exists() and rows.exists():
        found = read_json(described, CACHED, most=1 << 30)
        if found["about"] == about:
            return _cached(files, settings, found, rows)
    index, counts, skipped = build_index(*files, settings.max_length, settings.splitter())
    if settings.share:
        counts = [counts[0] + counts[1]] * 2
    content = {
        "about": about,
        "vocabularies": [most_frequent(c, settings.min_count, settings.max_size) for c in counts],
        "index": hashlib.sha256(np.ascontiguousarray(index)).hexdigest(),
        "skipped": skipped,
    }
    with atomic_write(rows, "wb") as file:
        np.save(file, index)
    with atomic_write(described) as file:
        file.write(json.dumps(content, ensure_ascii=False))
    return _cached(files, settings, content, rows)


def _describe(settings: Settings) -> dict:
    """Return settings for JSON."""
    model = settings.subwords
    return {**asdict(settings), "subwords": model and hashlib.sha256(model).hexdigest()}


def _cached(
    files: Files, settings: Settings, content: dict, rows: Path
) -> tuple[Corpus, np.ndarray]:
    split = settings.splitter()
    try:
        index = np.load(rows, mmap_mode="r")
        sizes = [path.stat().st_size for path in files]
        most = [*(size - 1 for size in sizes), settings.max_length, settings.max_length]
        if (index.dtype, index.ndim) != (np.int64, 2) or not len(index) or index.shape[1] != 4:
            raise ValueError(f"expected rows of 4 integers, got {index.dtype} {index.shape}")
        if (index.min(axis=0) < [0, 0, 1, 1]).any() or (index.max(axis=0) > most).any():
            raise ValueError("it leads out of the files")
        first, second = (Vocabulary(tokens, split) for tokens in content["vocabularies"])
    except (EOFError, ValueError) as error:
        raise ValueError(f"{rows}: not an index of these files; delete it ({error})") from None
    about = len(index), content["index"], content["skipped"]
    return Corpus(files, (first, second), *about, settings), index


class ParallelText(DatasetMixin):
    """Pairs of sentences, read from the files on access.

    Parameters
    ----------
    corpus : Corpus
    index : array-like of int64, shape (pairs, 4)
        Rows of the pairs.
    """

    def __init__(self, corpus: Corpus, index: Sequence[np.ndarray]) -> None:
        self.corpus = corpus
        self.index = np.asarray(index, np.int64).reshape(-1, 4)
        self._files = [path.open("rb") for path in corpus.files]

    def __len__(self) -> int:
        return len(self.index)

    def get_lines(self, i: int) -> tuple[str, str]:
        """Return the two lines of pair ``i``."""
        return self.lines_at(self.index[i])

    def lines_at(self, row: np.ndarray) -> tuple[str, str]:
        """Return the two lines of a row of an index."""
        texts = []
        for file, at in zip(self._files, row[[SOURCE_AT, TARGET_AT]].tolist(), strict=True):
            file.seek(at)
            texts.append(file.readline(LONGEST_LINE).decode().strip())
        return texts[0], texts[1]

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the tokens of pair ``i``."""
        return self.encode(self.get_lines(i))

    def encode(self, lines: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the tokens of two lines."""
        first, second = self.corpus.vocabularies
        return first.encode(lines[0]), second.encode(lines[1])

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
