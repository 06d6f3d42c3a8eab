"""A corpus: two files of parallel text, read from disk line by line, and their vocabularies."""

import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from chainer.dataset import DatasetMixin

import chainermn
import generated
from chainermn.agreement import run_on_root, run_together
from index import SOURCE_AT, TARGET_AT, build_index
from vocabulary import Vocabulary

T = TypeVar("T")

N_GENERATED = 21000


@dataclass
class Settings:
    """What decides what a corpus is made of its files.

    Attributes
    ----------
    min_count, max_size : int
        For tokens of the vocabularies.
    max_length : int
        Pairs in which one side has more tokens than that are skipped.
    share : bool
        Make one vocabulary for both languages.
    """

    min_count: int = 1
    max_size: int = 30000
    max_length: int = 50
    share: bool = False


@dataclass
class Corpus:
    """What all ranks know of a corpus.

    Attributes
    ----------
    source, target : Path
        Its two files: lines in UTF-8, line for line translations of each other.
    vocabularies : tuple of Vocabulary
        Of the source and of the target.
    skipped : dict
        How many pairs of lines cannot be used, by the reason.
    """

    source: Path
    target: Path
    vocabularies: tuple[Vocabulary, Vocabulary]
    skipped: dict[str, int]

    def digest(self) -> str:
        """Return what tells these vocabularies from others."""
        tokens = json.dumps([vocabulary.tokens for vocabulary in self.vocabularies])
        return hashlib.sha256(tokens.encode()).hexdigest()


def together(comm: chainermn.CommunicatorBase, act: Callable[[], T]) -> T:
    """Return ``act()``; if it fails on any rank because of a bad input, end the job.

    Raises
    ------
    SystemExit
        On every rank. Rank 0 prints the error.
    """
    return _or_end(comm, lambda: run_together(comm, "input", act))


def share(comm: chainermn.CommunicatorBase, act: Callable[[], T]) -> T:
    """Return ``act()`` of rank 0 on all ranks; if it fails, end the job as `together` does."""
    return _or_end(comm, lambda: run_on_root(comm, 0, "input", act))


def _or_end(comm: chainermn.CommunicatorBase, act: Callable[[], T]) -> T:
    try:
        return act()
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"error: {error}" if comm.rank == 0 else 1) from None


def load_corpus(
    source: Path | None,
    target: Path | None,
    cache: Path,
    settings: Settings,
    seed: int,
    comm: chainermn.CommunicatorBase,
) -> tuple[Corpus, np.ndarray | None]:
    """Make the corpus ready to be read by every rank. Collective.

    Parameters
    ----------
    source, target : Path or None
        Files, which may be gzipped; None: those that `generated` writes.
    cache : Path
        Folder for what is generated or unpacked, for the index and the vocabularies. Hosts that
        do not see that of rank 0 write their own.
    settings : Settings
    seed : int
        Of what is generated.
    comm : CommunicatorBase

    Returns
    -------
    corpus : Corpus
    index : array of int64, shape (pairs, 4), or None
        On rank 0; a memory map. See `index` for its columns.

    Raises
    ------
    SystemExit
        On every rank, if the files cannot be used.
    """

    def find_files() -> tuple[Path, Path]:
        cache.mkdir(parents=True, exist_ok=True)
        if source is None or target is None:
            stem = cache.resolve() / f"dates-{seed}"
            paths = stem.with_suffix(".source"), stem.with_suffix(".target")
            if not all(path.exists() for path in paths):
                generated.write(*paths, N_GENERATED, seed)
            return paths
        return _unpack(source, cache), _unpack(target, cache)

    # Rank 0 for all, then the first rank of each host, which finds it done or does so there.
    paths = share(comm, find_files)
    together(comm, lambda: find_files() if comm.intra_rank == 0 else None)
    index: np.ndarray | None = None

    def prepare() -> tuple[Corpus, list[int]]:
        nonlocal index
        corpus, index = _prepare(*paths, cache, settings)
        return corpus, [path.stat().st_size for path in paths]

    corpus, sizes = share(comm, prepare)

    def check_files() -> None:
        for path, size in zip(paths, sizes, strict=True):
            if not path.exists() or path.stat().st_size != size:
                raise ValueError(f"{path} is not the same file on all hosts")

    together(comm, check_files)
    return corpus, index


def _unpack(path: Path, cache: Path) -> Path:
    """Return a file with the lines of ``path``, in which one can jump to any of them."""
    path = path.resolve()
    if path.suffix != ".gz":
        path.open("rb").close()  # raises where it cannot be read
        return path
    with path.open("rb") as packed:
        # Ends in a checksum of its lines. Times would differ from host to host.
        packed.seek(-min(8, path.stat().st_size), os.SEEK_END)
        mark = packed.read().hex()
    unpacked = cache.resolve() / f"{mark}-{path.stem}"
    if not unpacked.exists():
        unfinished = unpacked.with_name(f"{unpacked.name}.{os.getpid()}")
        try:
            with gzip.open(path) as packed, unfinished.open("wb") as lines:
                shutil.copyfileobj(packed, lines)
            unfinished.replace(unpacked)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from None
        finally:
            unfinished.unlink(missing_ok=True)
    return unpacked


def _prepare(
    source: Path, target: Path, cache: Path, settings: Settings
) -> tuple[Corpus, np.ndarray]:
    """Index two files and make their vocabularies, or take both from the cache."""
    about = {
        "files": [
            [str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in (source, target)
        ],
        **asdict(settings),
    }
    described, rows = cache / "vocabulary.json", cache / "index.npy"
    if described.exists() and rows.exists():
        found = json.loads(described.read_text(encoding="utf-8"))
        if found["about"] == about:
            first, second = map(Vocabulary, found["vocabularies"])
            corpus = Corpus(source, target, (first, second), found["skipped"])
            return corpus, np.load(rows, mmap_mode="r")
    index, counts, skipped = build_index(source, target, settings.max_length)
    if settings.share:
        counts = [counts[0] + counts[1]] * 2
    first, second = (Vocabulary.of(c, settings.min_count, settings.max_size) for c in counts)
    described.unlink(missing_ok=True)
    np.save(rows, index)
    content = {
        "about": about,
        "vocabularies": [first.tokens, second.tokens],
        "skipped": skipped,
    }
    unfinished = described.with_suffix(".part")
    unfinished.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(described)
    return Corpus(source, target, (first, second), skipped), np.load(rows, mmap_mode="r")


class ParallelText(DatasetMixin):
    """Pairs of sentences, read from the files when they are asked for.

    Parameters
    ----------
    corpus : Corpus
    index : array-like of int64, shape (pairs, 4)
        Which pairs.
    """

    def __init__(self, corpus: Corpus, index: Sequence[np.ndarray]) -> None:
        self.corpus = corpus
        self.index = np.asarray(index, np.int64).reshape(-1, 4)
        self._files = corpus.source.open("rb"), corpus.target.open("rb")

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
            texts.append(file.readline().decode().strip())
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
