"""Parallel text: files that are indexed and not loaded, vocabularies, and batches."""

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import chainer
import numpy as np
from chainer.dataset import DatasetMixin

import chainermn
import generated
from chainermn.agreement import run_on_root, run_together
from model import EOS, PADDING, UNK
from terminal import Progress

T = TypeVar("T")

N_GENERATED = 21000
SPACE = "\u2581"  # before a token: there was a space, or it is the first of its line
# Words, each digit for itself, each other character for itself.
TOKEN = re.compile(r"(\s*)([^\W\d_]+|\S)")

# Columns of an index, which has a row for each pair of lines.
SOURCE_AT, TARGET_AT, SOURCE_LENGTH, TARGET_LENGTH = range(4)  # bytes into a file, tokens


def tokenize(line: str) -> list[str]:
    """Divide a line into tokens, from which `detokenize` makes it again.

    Examples
    --------
    >>> tokenize("May 12, 1984")
    ['▁May', '▁1', '2', ',', '▁1', '9', '8', '4']
    """
    tokens = [(SPACE if space else "") + token for space, token in TOKEN.findall(line)]
    return [SPACE + tokens[0].removeprefix(SPACE), *tokens[1:]] if tokens else []


def detokenize(tokens: Sequence[str]) -> str:
    """Return the line that was divided, but for the kind and number of its spaces."""
    return "".join(tokens).replace(SPACE, " ").strip()


class Vocabulary:
    """Tokens and their numbers.

    Parameters
    ----------
    tokens : sequence of str
        The first two are for the end of a sentence and for all tokens that are not in it.
    """

    SPECIAL = ("<eos>", "<unk>")  # numbers EOS and UNK; no line has tokens like these

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._numbers = {token: number for number, token in enumerate(tokens)}
        assert self.tokens[EOS : UNK + 1] == self.SPECIAL

    @classmethod
    def of(cls, counts: Counter[str], min_count: int, max_size: int) -> "Vocabulary":
        """Take the most frequent tokens: at most ``max_size``, each at least ``min_count`` times.

        Tokens that are equally frequent come in alphabetical order.
        """
        frequent = sorted(counts, key=lambda token: (-counts[token], token))
        kept = [token for token in frequent if counts[token] >= min_count]
        return cls([*cls.SPECIAL, *kept][:max_size])

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, line: str) -> np.ndarray:
        """Return the numbers of a line's tokens, int32."""
        return np.array([self._numbers.get(token, UNK) for token in tokenize(line)], np.int32)

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the line of such numbers."""
        return detokenize([self.tokens[number] for number in numbers])


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


def load(
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
        On rank 0; a memory map. See ``SOURCE_AT`` and the other columns.

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
    index, counts, skipped = _index(source, target, settings)
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


def _index(
    source: Path, target: Path, settings: Settings
) -> tuple[np.ndarray, list[Counter[str]], dict[str, int]]:
    rows: list[np.ndarray] = []
    chunk: list[tuple[int, int, int, int]] = []
    counts: list[Counter[str]] = [Counter(), Counter()]
    skipped = {"empty": 0, "not UTF-8": 0, "too long": 0}
    bar = Progress(source.stat().st_size, "vocabulary")
    at, lines = [0, 0], [0, 0]
    with source.open("rb") as sources, target.open("rb") as targets:
        while True:
            raw = sources.readline(), targets.readline()
            if not all(raw):
                break
            try:
                tokens = [tokenize(line.decode()) for line in raw]
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
            else:
                lengths = [len(side) for side in tokens]
                if not all(lengths):
                    skipped["empty"] += 1
                elif max(lengths) > settings.max_length:
                    skipped["too long"] += 1
                else:
                    chunk.append((*at, *lengths))
                    for count, side in zip(counts, tokens, strict=True):
                        count.update(side)
            at = [position + len(line) for position, line in zip(at, raw, strict=True)]
            lines = [number + 1 for number in lines]
            if len(chunk) == 100_000:  # tuples take ten times the memory of an array
                rows.append(np.array(chunk, np.int64))
                chunk = []
            bar.to(at[0])
        lines = [
            n + sum(1 for _ in file) + bool(line)
            for n, file, line in zip(lines, (sources, targets), raw, strict=True)
        ]
    if lines[0] != lines[1]:
        raise ValueError(
            f"the files must be translations line for line, but {source} has {lines[0]} lines "
            f"and {target} has {lines[1]}"
        )
    rows.append(np.array(chunk, np.int64).reshape(-1, 4))
    index = np.concatenate(rows)
    skipped = {reason: n for reason, n in skipped.items() if n}
    if len(index) < 2:
        raise ValueError(
            f"{source} and {target} need two pairs of lines or more, one to train on and one to "
            f"validate with, but have {len(index)} (skipped: {skipped or 'none'})"
        )
    return index, counts, skipped


def hold_out(index: np.ndarray, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide an index into rows to train on and ``n``, or half of them, to validate; shuffled."""
    order = np.random.RandomState(seed).permutation(len(index))
    n = min(n, len(index) // 2)
    return index[order[n:]], index[order[:n]]


def cut_batches(index: np.ndarray, batchsize: int) -> list[np.ndarray]:
    """Cut rows into batches of similar length.

    Validation data are scattered in whole batches, as the last bit of a result depends on what
    else is in a batch: so translations are the same on any number of ranks.
    """
    order = np.lexsort((index[:, TARGET_LENGTH], index[:, SOURCE_LENGTH]))
    return [index[order[i : i + batchsize]] for i in range(0, len(order), batchsize)]


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


def pad(sentences: Sequence[np.ndarray]) -> np.ndarray:
    """Put sentences into one array of shape (sentences, length of the longest)."""
    padded = np.full((len(sentences), max(map(len, sentences))), PADDING, np.int32)
    for row, sentence in zip(padded, sentences, strict=True):
        row[: len(sentence)] = sentence
    return padded


@chainer.dataset.converter()
def to_batch(
    examples: list[tuple[np.ndarray, np.ndarray]], device: chainer.backend.Device
) -> tuple[np.ndarray, np.ndarray]:
    """Make two padded arrays of examples, on a device."""
    xs, ys = zip(*examples, strict=True)
    return device.send(pad(xs)), device.send(pad(ys))


class BucketIterator(chainer.dataset.Iterator):
    """Batches of sentences of similar length, shuffled anew for each epoch.

    Which batches there are depends only on the seed and on the epoch, and their number only on
    that of the examples. So ranks with equally many examples end their epochs together, and
    come to their batches of long sentences at about the same time.

    Parameters
    ----------
    dataset : ParallelText
    batchsize : int
    seed : int
        The same on all ranks.
    pool : int
        Batches whose examples are sorted together; the more, the less padding and the less
        random.
    """

    def __init__(self, dataset: ParallelText, batchsize: int, seed: int, pool: int = 50) -> None:
        self.dataset, self.batchsize, self.seed, self.pool = dataset, batchsize, seed, pool
        self.epoch = self.position = 0  # position: batches of this epoch so far
        self.is_new_epoch = False
        self._batches = self._shuffle()

    def __next__(self) -> list[tuple[np.ndarray, np.ndarray]]:
        batch = [self.dataset[i] for i in self._batches[self.position]]
        self.position += 1
        self.is_new_epoch = self.position == len(self._batches)
        if self.is_new_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self._shuffle()
        return batch

    @property
    def epoch_detail(self) -> float:
        """Epochs so far."""
        return self.epoch + self.position / len(self._batches)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write where it is. Rank 0's state serves all ranks."""
        self.epoch = int(serializer("epoch", self.epoch))
        self.position = int(serializer("position", self.position))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._batches = self._shuffle()

    def finalize(self) -> None:
        """Close the files."""
        self.dataset.close()

    def _shuffle(self) -> list[list[int]]:
        random = np.random.RandomState([self.seed, self.epoch])
        order = random.permutation(len(self.dataset))
        size = self.batchsize * self.pool
        batches = [batch for pool in _cut(order, size) for batch in self._cut_sorted(pool)]
        return [batches[i].tolist() for i in random.permutation(len(batches))]

    def _cut_sorted(self, pool: np.ndarray) -> Iterator[np.ndarray]:
        lengths = self.dataset.index[pool]
        by_length = np.lexsort((lengths[:, TARGET_LENGTH], lengths[:, SOURCE_LENGTH]))
        return _cut(pool[by_length], self.batchsize)


def _cut(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (order[i : i + size] for i in range(0, len(order), size))
