"""Training and validation text, according to the options."""

import argparse
import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import chainermn
from batches import cut_batches, hold_out
from chainermn.agreement import run_on_root
from chainermn.datasets.names import shown
from chainermn.datasets.texts import Form
from corpus import Corpus, ParallelText, Settings, load_corpus, load_more
from subwords import Subwords

N_SHOWN, MOST_SHOWN = 3, 120  # pairs, and characters of each of their lines


@dataclass
class Text:
    """Two corpora, which are the same one if part of it is held out, and what to use of them.

    Attributes
    ----------
    corpus, validated : Corpus
        To train on and to validate with.
    train : array of int64, shape (pairs, 4), or None
        Rows of an index, on rank 0.
    validation : list of (array of int64, shape (batchsize, 4)), or None
        Batches of such rows, on rank 0.
    """

    corpus: Corpus
    validated: Corpus
    train: np.ndarray | None
    validation: list[np.ndarray] | None

    def check(self) -> None:
        """Raise OSError or ValueError if a file has changed since it was indexed."""
        self.corpus.check()
        self.validated.check()

    def digests(self) -> list[str]:
        """Return a digest of the corpora."""
        return [self.corpus.digest(), self.validated.digest()]


def load_text(
    args: argparse.Namespace, comm: chainermn.CommunicatorBase, form: Form = "NFC"
) -> Text:
    """Load the text that the options of train.py name, and print what it is. Collective.

    Parameters
    ----------
    args : Namespace
    comm : CommunicatorBase
    form : {'NFC', None}
        Normal form of Unicode that lines are brought into.

    Raises
    ------
    OSError, RuntimeError, ValueError
        On every rank, if the files cannot be used.
    """
    cache = args.cache or Path(args.out, "corpus")
    subwords = None
    if args.subwords:
        subwords = run_on_root(comm, 0, "--subwords", lambda: Subwords.read(args.subwords).model)
    limits = args.min_count, args.max_vocabulary, args.max_length
    settings = Settings(*limits, args.share_embedding, subwords, form)
    files = (args.source, args.target) if args.source else None
    corpus, index = load_corpus(files, cache, settings, args.seed, comm)
    validated, others = corpus, None
    if args.validation_source:
        more = args.validation_source, args.validation_target
        validated, others = load_more(more, cache, corpus, comm)
    train = validation = None

    def choose() -> None:
        nonlocal train, validation
        n_held_out = args.hold_out if validated is corpus else 0
        train, held_out = hold_out(index, n_held_out, args.seed)
        rows = held_out if validated is corpus else others
        validation = cut_batches(rows, args.batchsize)
        _print_sizes(corpus, validated, len(train), len(rows))
        names = files or [stamp.path for stamp in corpus.stamps]
        print(f"from {shown(names[0])} to {shown(names[1])}, for example:")
        _print_pairs(corpus, train[:N_SHOWN])

    run_on_root(comm, 0, "choosing pairs", choose)
    return Text(corpus, validated, train, validation)


def _print_sizes(corpus: Corpus, validated: Corpus, n_train: int, n_validation: int) -> None:
    print(
        f"{n_train} pairs to train on, {n_validation} to validate with, "
        f"skipped: {_list(corpus.skipped)}"
    )
    if validated is not corpus:
        print(f"skipped of those to validate with: {_list(validated.skipped)}")
        if validated.stamps[0].digest == corpus.stamps[0].digest:
            print("warning: the text to validate with is the one to train on")
        unknown = " and ".join(f"{share:.1%}" for share in validated.unknown)
        print(f"unknown tokens of those to validate with: {unknown}")
    if corpus.stamps[0].digest == corpus.stamps[1].digest:
        print("warning: source and target are the same text")
    source, target = map(len, corpus.vocabularies)
    print(f"vocabularies of {source} and {target} tokens")


def _print_pairs(corpus: Corpus, rows: np.ndarray) -> None:
    """Print pairs as a network gets them, so that people see what is wrong with their files."""
    with contextlib.closing(ParallelText(corpus, rows)) as pairs:
        for pair in pairs:
            lines = (v.decode(tokens) for v, tokens in zip(corpus.vocabularies, pair, strict=True))
            print("  " + "  ->  ".join(readable(line[:MOST_SHOWN]) for line in lines), flush=True)


def readable(line: str) -> str:
    """Return a line for terminals: characters that would control them are escaped."""
    control = r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(control, lambda found: ascii(found[0])[1:-1], line)


def _list(skipped: dict[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "none"
