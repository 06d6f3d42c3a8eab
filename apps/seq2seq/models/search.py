"""Beam search."""

from typing import Any, Protocol

import chainer
import chainer.functions as F
import numpy as np

from vocabulary import EOS


class Decoding(Protocol):
    """Translations in progress, one per row, token by token."""

    def step(self, last: np.ndarray) -> chainer.Variable:
        """Append the token ``last`` to each row and score the next token.

        Parameters
        ----------
        last : array of int32, shape (rows,)
            `EOS` at the start.

        Returns
        -------
        chainer.Variable
            Scores of shape (rows, vocabulary), before the softmax.
        """

    def select(self, rows: np.ndarray) -> None:
        """Replace each row by the one with the given number, which has the same source."""


def beam_search(
    decoding: Decoding, xp: Any, batch: int, beam: int, max_length: int
) -> list[np.ndarray]:
    """Return the best translations that are found.

    Parameters
    ----------
    decoding : Decoding
        Row ``i * beam + j`` is for beginning ``j`` of the translation of sentence ``i``.
    xp : module
        NumPy or CuPy.
    batch : int
        Number of sentences.
    beam : int
        Number of beginnings of a translation to keep at a time; 1 is the greedy choice. In the
        end, the best translation is the one with the highest mean log-probability per token.
    max_length : int
        Largest number of tokens of a translation.

    Returns
    -------
    list of (array of int32)
        The translations, in host memory, without an end of sentence.
    """
    first_rows = beam * xp.arange(batch)[:, None]
    tokens = xp.zeros((batch * beam, 0), np.int32)
    last = xp.full(batch * beam, EOS, np.int32)
    # A single beginning at the start, or all would stay the same.
    scores = xp.where(xp.arange(beam) == 0, np.float32(0), np.float32(-np.inf))
    scores = xp.tile(scores, (batch, 1))
    lengths = xp.zeros((batch, beam), np.int32)
    finished = xp.zeros((batch, beam), bool)
    for _ in range(max_length + 1):
        log_p = F.log_softmax(F.cast(decoding.step(last), np.float32)).array
        n_vocabulary = log_p.shape[1]
        # A finished translation continues with ends only, which cost nothing.
        end = xp.where(xp.arange(n_vocabulary) == EOS, np.float32(0), np.float32(-np.inf))
        log_p = xp.where(finished[:, :, None], end, log_p.reshape(batch, beam, -1))
        totals = (scores[:, :, None] + log_p).reshape(batch, -1)
        best = xp.argpartition(-totals, beam - 1, axis=1)[:, :beam]
        scores = xp.take_along_axis(totals, best, axis=1)
        parents, last = best // n_vocabulary, (best % n_vocabulary).astype(np.int32)
        lengths = xp.take_along_axis(lengths + ~finished, parents, axis=1)
        finished = xp.take_along_axis(finished, parents, axis=1) | (last == EOS)
        rows, last = (first_rows + parents).ravel(), last.ravel()
        decoding.select(rows)
        tokens = xp.concatenate([tokens[rows], last[:, None]], axis=1)
        if finished.all():
            break
    winners = first_rows[:, 0] + (scores / lengths).argmax(axis=1)
    chosen = chainer.backends.cuda.to_cpu(tokens[winners])
    return [row[: _first_end(row, max_length)] for row in chosen]


def _first_end(row: np.ndarray, max_length: int) -> int:
    ends = np.flatnonzero(row == EOS)
    return int(ends[0]) if len(ends) else max_length
