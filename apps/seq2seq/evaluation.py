"""Scores of translations: the same numbers on one rank as on many."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from sacrebleu.metrics import BLEU, CHRF

import chainermn
from batches import to_batch
from corpus import Corpus, ParallelText, ending_job
from models import Translator, count_tokens
from vocabulary import EOS, SPACE

MOST_TOKENS_DRAWN = 30
METRICS = {"bleu": BLEU(), "chrf": CHRF()}


@dataclass
class Result:
    """Counts over the sentences of a batch.

    Attributes
    ----------
    sentences, exact, tokens : int
        Numbers of sentences, of those translated exactly as in the corpus, and of tokens in the
        references.
    loss : float
        Sum of the cross entropy of the tokens.
    counts : dict of (array of int64)
        Counts of n-grams that each metric needs.
    example : tuple of str
        A sentence, its translation in the corpus and that of the model.
    """

    sentences: int
    exact: int
    tokens: int
    loss: float
    counts: dict[str, np.ndarray]
    example: tuple[str, str, str]


def count_ngrams(
    metric: Any, translations: Sequence[str], references: Sequence[str]
) -> np.ndarray:
    """Return sacreBLEU's counts for sentences; their sum gives the score of a corpus.

    There is a public way to get them for BLEU, but not for chrF.
    """
    return np.sum(metric._extract_corpus_statistics(translations, [references]), 0, np.int64)


def is_exact(translation: str, reference: str) -> bool:
    """Tell whether a translation is that of the corpus, whatever the kind of its white space.

    Tokens say only whether there is some, so a network cannot know more.
    """
    return translation.split() == reference.split()


def score(metric: Any, counts: Sequence[np.ndarray]) -> float:
    """Return the score, from 0 to 100, of all sentences whose n-grams have been counted."""
    return metric._aggregate_and_compute([row.tolist() for row in counts]).score


class TranslationEvaluator(chainermn.extensions.GenericMultiNodeEvaluator):
    """Translates the validation data of all ranks and reports scores, on rank 0.

    It reports as ``validation/main/...``: ``loss``, the mean per token; ``exact``, the share of
    sentences that are translated exactly; ``bleu`` and ``chrf``, of the whole corpus. None of
    these is a mean of means, so the results are the same on any number of ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    batches : list of (array of int64, shape (batchsize, 4))
        Rows of an index, those of this rank.
    corpus : Corpus
    model : Translator
    device : chainer.backend.Device
    """

    def __init__(
        self,
        comm: chainermn.CommunicatorBase,
        batches: Sequence[np.ndarray],
        corpus: Corpus,
        model: Translator,
        device: chainer.backend.Device,
    ) -> None:
        iterator = chainer.iterators.SerialIterator(batches, 1, repeat=False, shuffle=False)
        read = chainer.dataset.converter()(self._read)
        super().__init__(comm, iterator, model, device, read)
        self.corpus, self.model = corpus, model
        self.examples: list[tuple[str, str, str]] = []

    def _read(self, batch: list[np.ndarray], device: chainer.backend.Device) -> tuple[Any, ...]:
        (rows,) = batch
        with ending_job(), contextlib.closing(ParallelText(self.corpus, rows)) as text:
            lines = [text.get_lines(i) for i in range(len(text))]
        return *to_batch([text.encode(pair) for pair in lines], device), lines

    def calc_local(self, xs: np.ndarray, ys: np.ndarray, lines: list[tuple[str, str]]) -> Result:
        """Translate a batch and count."""
        references = [target for _, target in lines]
        decode = self.corpus.vocabularies[1].decode
        translations = [decode(row.tolist()) for row in self.model.translate(xs)]
        tokens = count_tokens(ys[:, :0], ys)
        counts = {name: count_ngrams(m, translations, references) for name, m in METRICS.items()}
        exact = sum(map(is_exact, translations, references))
        loss = float(self.model.loss(xs, ys).array) * tokens
        return Result(len(lines), exact, tokens, loss, counts, (*lines[0], translations[0]))

    def aggregate(self, results: list[Result]) -> dict[str, float]:
        """Add up, report and return."""
        found = {
            # Rounded once, whatever the order in which ranks sent them.
            "loss": math.fsum(r.loss for r in results) / sum(r.tokens for r in results),
            "exact": sum(r.exact for r in results) / sum(r.sentences for r in results),
        }
        for name, metric in METRICS.items():
            found[name] = score(metric, [r.counts[name] for r in results])
        found = {f"{self.default_name}/main/{name}": value for name, value in found.items()}
        self.examples = sorted(r.example for r in results)
        chainer.report(found)
        return found


def draw_attention(evaluator: TranslationEvaluator, path: Path) -> None:
    """Draw the attention of the network while it translates one of the examples.

    The example is the longest that fits into a picture.

    Parameters
    ----------
    evaluator : TranslationEvaluator
        On rank 0, after it has evaluated.
    path : Path
        PNG file to write.
    """
    from matplotlib import pyplot as plt

    model = evaluator.model
    first, second = evaluator.corpus.vocabularies
    pairs = [(first.encode(line), second.encode(found)) for line, _, found in evaluator.examples]
    lengths = [max(map(len, pair)) for pair in pairs]
    room = max(MOST_TOKENS_DRAWN, min(lengths))
    chosen = max((n, i) for i, n in enumerate(lengths) if n <= room)[1]
    xs, ys = (tokens[None] for tokens in pairs[chosen])
    weights = model.attend(xs, ys)[0]
    source = [first.tokens[i].removeprefix(SPACE) for i in xs[0]]
    target = [second.tokens[i].removeprefix(SPACE) for i in (*ys[0], EOS)]

    figure, axes = plt.subplots(
        figsize=(2 + 0.4 * len(source), 1.6 + 0.3 * len(target)), layout="constrained"
    )
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(source)), source, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.set_xlabel("read")
    axes.set_ylabel("written")
    figure.colorbar(image, label="weight of attention")
    figure.savefig(path, dpi=120)
    plt.close(figure)
