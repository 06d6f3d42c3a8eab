"""Training and validation text, according to the options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import chainermn
from batches import cut_batches, hold_out
from chainermn.agreement import run_on_root
from corpus import Corpus, Settings, load_corpus, load_more
from subwords import Subwords


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

    def digests(self) -> list[str]:
        """Return a digest of the corpora."""
        return [self.corpus.digest(), self.validated.digest()]


def load_text(args: argparse.Namespace, comm: chainermn.CommunicatorBase) -> Text:
    """Load the text that the options of train.py name, and print its size. Collective.

    Raises
    ------
    OSError, RuntimeError, ValueError
        On every rank, if the files cannot be used.
    """
    cache = args.cache or Path(args.out, "corpus")
    subwords = None
    if args.subwords:
        subwords = run_on_root(comm, 0, "--subwords", lambda: Subwords.read(args.subwords).model)
    settings = Settings(
        args.min_count, args.max_vocabulary, args.max_length, args.share_embedding, subwords
    )
    files = (args.source, args.target) if args.source else None
    corpus, index = load_corpus(files, cache, settings, args.seed, comm)
    validated, others = corpus, None
    if args.validation_source:
        files = args.validation_source, args.validation_target
        validated, others = load_more(files, cache, corpus, comm)
    if comm.rank != 0:
        return Text(corpus, validated, None, None)
    train, held_out = hold_out(index, args.hold_out if validated is corpus else 0, args.seed)
    validation = held_out if validated is corpus else others
    print(
        f"{len(train)} pairs to train on, {len(validation)} to validate with, "
        f"skipped: {_list(corpus.skipped)}"
    )
    if validated is not corpus:
        print(f"skipped of those to validate with: {_list(validated.skipped)}")
    source, target = map(len, corpus.vocabularies)
    print(f"vocabularies of {source} and {target} tokens", flush=True)
    return Text(corpus, validated, train, cut_batches(validation, args.batchsize))


def _list(skipped: dict[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "none"
