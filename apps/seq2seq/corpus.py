"""A corpus: two files of parallel text, read from disk line by line, and their vocabularies."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from chainer.dataset import DatasetMixin

import chainermn
import generated
from chainermn.agreement import run_on_root, run_together
from chainermn.datasets.names import shown
from chainermn.datasets.stamps import Stamp
from chainermn.datasets.texts import Form, LinesAt, unpacked
from chainermn.files import atomic_write, read_json
from chainermn.global_except_hook import exit_job
from index import SOURCE_AT, TARGET_AT, build_index
from subwords import Subwords
from vocabulary import Vocabulary, most_frequent, tokenize

N_GENERATED = 21000
WHERE = "input"  # in messages
# Form of the JSON in the cache.
CACHED = {"vocabularies": ([str], [str]), "index": str, "skipped": {str: int}}

Files = tuple[Path, Path]  # of the source and of the target
Stamps = tuple[Stamp, Stamp]


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
    normalization : {'NFC', None}
        Normal form of Unicode that lines are brought into.
    """

    min_count: int = 1
    max_size: int = 30000
    max_length: int = 50
    share: bool = False
    subwords: bytes | None = None
    normalization: Form = "NFC"

    def splitter(self) -> Callable[[str], list[str]]:
        """Return what divides lines into tokens."""
        return tokenize if self.subwords is None else Subwords(self.subwords)


@dataclass
class Corpus:
    """What all ranks know about a corpus.

    Attributes
    ----------
    stamps : tuple of Stamp
        Files of lines in UTF-8, not gzipped, line for line translations of each other: those of
        this host.
    vocabularies : tuple of Vocabulary
        Of the source and of the target.
    n_pairs : int
        Number of usable pairs of lines.
    index_digest : str
        Digest of the index.
    skipped : dict
        Number of unusable pairs, by reason.
    settings : Settings
    unknown : tuple of float
        Share of the tokens that are not in the vocabularies, for text to validate with.
    """

    stamps: Stamps
    vocabularies: tuple[Vocabulary, Vocabulary]
    n_pairs: int
    index_digest: str
    skipped: dict[str, int]
    settings: Settings
    unknown: tuple[float, float] = (0, 0)

    def digest(self) -> str:
        """Return a digest of this corpus."""
        tokens = [vocabulary.tokens for vocabulary in self.vocabularies]
        about = _describe(self.stamps, self.settings)
        return _digest([tokens, self.index_digest, self.skipped, about])

    def check(self) -> None:
        """Raise OSError or ValueError if a file has changed since it was indexed."""
        for stamp in self.stamps:
            stamp.check()


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

    dates = cache / f"dates-{seed}"
    paths = files or (dates.with_suffix(".source"), dates.with_suffix(".target"))

    def write() -> None:
        if files is None and not all(path.exists() for path in paths):
            generated.write(*paths, N_GENERATED, seed)

    return _load(
        paths, write, lambda stamps: _prepare(paths, stamps, cache, settings), cache, comm
    )


def load_more(
    files: Files, cache: Path, corpus: Corpus, comm: chainermn.CommunicatorBase
) -> tuple[Corpus, np.ndarray | None]:
    """Prepare another corpus, with the vocabularies and settings of the first. Collective.

    Parameters, return values and exceptions are those of `load_corpus`. Text is also refused if
    more than half of its tokens are not in the vocabularies.
    """

    def prepare(stamps: Stamps) -> tuple[Corpus, np.ndarray]:
        index, counts, skipped = _index(files, stamps, corpus.settings)
        unknown = tuple(map(_share_unknown, counts, corpus.vocabularies))
        for path, share in zip(files, unknown, strict=True):
            if share > 0.5:
                raise ValueError(
                    f"{shown(path)}: {share:.1%} of the tokens are not in the vocabulary of the "
                    "training: expected text in the same language; are the sides swapped?"
                )
        about = {"n_pairs": len(index), "skipped": skipped, "unknown": unknown}
        return replace(corpus, stamps=stamps, **about), index

    return _load(files, lambda: None, prepare, cache, comm)


def _share_unknown(counts: Counter[str], vocabulary: Vocabulary) -> float:
    known = set(vocabulary.tokens)
    return sum(n for token, n in counts.items() if token not in known) / counts.total()


def _load(
    files: Files,
    write: Callable[[], None],
    prepare: Callable[[Stamps], tuple[Corpus, np.ndarray]],
    cache: Path,
    comm: chainermn.CommunicatorBase,
) -> tuple[Corpus, np.ndarray | None]:
    def find() -> Stamps:
        cache.mkdir(parents=True, exist_ok=True)
        write()
        return unpacked(files[0], cache), unpacked(files[1], cache)

    is_first = comm.intra_rank == 0
    index: np.ndarray | None = None

    def find_and_prepare() -> Corpus:
        nonlocal index
        corpus, index = prepare(find())
        corpus.check()
        return corpus

    def stamps_of_this_host() -> Stamps | None:
        if not is_first:
            return None
        if comm.rank > 0:
            find()  # other hosts may not see the folder of rank 0
        return tuple(stamp.of_this_host() for stamp in corpus.stamps)

    corpus = run_on_root(comm, 0, WHERE, find_and_prepare)
    own = comm.inter_rank, run_together(comm, WHERE, stamps_of_this_host)
    hosts = dict(found for found in comm.allgather_obj(own) if found[1])
    return replace(corpus, stamps=hosts[comm.inter_rank]), index


def _index(
    files: Files, stamps: Stamps, settings: Settings
) -> tuple[np.ndarray, list[Counter[str]], dict[str, int]]:
    form, split = settings.normalization, settings.splitter()
    return build_index((stamps[0].path, stamps[1].path), files, settings.max_length, form, split)


def _prepare(
    files: Files, stamps: Stamps, cache: Path, settings: Settings
) -> tuple[Corpus, np.ndarray]:
    """Index two files and make their vocabularies, or take both from the cache."""
    # Jobs with other files or settings may use the same folder.
    key = _digest(_describe(stamps, settings))
    described, rows = cache / f"vocabulary-{key}.json", cache / f"index-{key}.npy"
    if not (described.exists() and rows.exists()):
        index, counts, skipped = _index(files, stamps, settings)
        if settings.share:
            counts = [counts[0] + counts[1]] * 2
        with atomic_write(rows, "wb") as file:
            np.save(file, index)
        limits = settings.min_count, settings.max_size
        content = {
            "vocabularies": [most_frequent(c, *limits) for c in counts],
            "index": Stamp.of(rows).digest,
            "skipped": skipped,
        }
        with atomic_write(described) as file:
            file.write(json.dumps(content, ensure_ascii=False))
    content = read_json(described, CACHED, most=1 << 30)
    if Stamp.of(rows).digest != content["index"]:
        raise ValueError(f"{rows}: not the index of these files: delete it")
    index, split = np.load(rows, mmap_mode="r"), settings.splitter()
    try:
        source, target = (Vocabulary(tokens, split) for tokens in content["vocabularies"])
    except ValueError as error:
        raise ValueError(f"{described}: {error}: delete it") from None
    about = len(index), content["index"], content["skipped"]
    return Corpus(stamps, (source, target), *about, settings), index


def _describe(stamps: Stamps, settings: Settings) -> dict:
    """Return for JSON what a corpus is made of."""
    model = settings.subwords
    return {
        **asdict(settings),
        "subwords": model and hashlib.sha256(model).hexdigest(),
        "files": [stamp.digest for stamp in stamps],
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


@contextlib.contextmanager
def ending_job() -> Iterator[None]:
    """End the job with one line if a rank cannot read a file any more, or it has changed."""
    try:
        yield
    except (OSError, ValueError) as error:
        exit_job(str(error))


class ParallelText(DatasetMixin):
    """Pairs of sentences, read from the files on access.

    Parameters
    ----------
    corpus : Corpus
    index : array-like of int64, shape (pairs, 4)
        Rows of the pairs.

    Raises
    ------
    OSError, ValueError
        Here and on access, if a file has changed since it was indexed.
    """

    def __init__(self, corpus: Corpus, index: Sequence[np.ndarray]) -> None:
        self.corpus = corpus
        self.index = np.asarray(index, np.int64).reshape(-1, 4)
        form = corpus.settings.normalization
        self._files = [LinesAt(stamp, form) for stamp in corpus.stamps]

    def __len__(self) -> int:
        return len(self.index)

    def get_lines(self, i: int) -> tuple[str, str]:
        """Return the two lines of pair ``i``."""
        return self.lines_at(self.index[i])

    def lines_at(self, row: np.ndarray) -> tuple[str, str]:
        """Return the two lines of a row of an index."""
        source, target = self._files
        return source.read(int(row[SOURCE_AT])), target.read(int(row[TARGET_AT]))

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
