"""The common part of all networks."""

from typing import ClassVar

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from models.search import Decoding, beam_search
from vocabulary import EOS, PADDING


class Translator(chainer.Chain):
    """A network that translates. Subclasses define `decode` and `begin`.

    Sentences are in host memory, and the network sends what it needs to its device.

    Attributes
    ----------
    SIZES : dict
        Sizes that a saved network may have, in the form that ``chainermn.files`` checks.
    """

    SIZES: ClassVar[dict[str, object]] = {
        "n_units": range(1, 1 << 16),
        "n_layers": range(1, 1 << 10),
        "share_embedding": bool,
    }

    @staticmethod
    def count_matrices(n_layers: int) -> int:
        """Return how many matrices of units by units a network has at least."""
        return 0

    def decode(self, xs: np.ndarray, ys: np.ndarray) -> tuple[chainer.Variable, chainer.Variable]:
        """Score every token of known translations.

        Parameters
        ----------
        xs, ys : array of int32, shapes (batch, source length) and (batch, target length)
            Sentences and their translations, padded. ``ys`` is without an end of sentence.

        Returns
        -------
        scores : chainer.Variable
            Scores of shape (batch * (target length + 1), vocabulary), before the softmax.
        weights : chainer.Variable
            Attention weights of shape (batch, target length + 1, source length).
        """
        raise NotImplementedError

    def begin(self, xs: np.ndarray, beam: int = 1) -> Decoding:
        """Encode sentences, and begin to write ``beam`` translations of each, in adjacent rows."""
        raise NotImplementedError

    def forward(self, xs: np.ndarray, ys: np.ndarray) -> chainer.Variable:
        """Return the mean cross entropy of a token; report it, and the number of tokens.

        Parameters
        ----------
        xs, ys : array of int32, shapes (batch, source length) and (batch, target length)
            Sentences and their translations, padded.
        """
        loss = self.loss(xs, ys)
        chainer.report({"loss": loss, "tokens": count_tokens(xs, ys)}, self)
        return loss

    def loss(self, xs: np.ndarray, ys: np.ndarray) -> chainer.Variable:
        """Return the mean cross entropy of a token."""
        return cross_entropy(self.decode(xs, ys)[0], ys)

    def attend(self, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
        """Return the weights of attention: (batch, target length + 1, source length)."""
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return chainer.backends.cuda.to_cpu(self.decode(xs, ys)[1].array)

    def translate(self, xs: np.ndarray, beam: int = 1) -> list[np.ndarray]:
        """Translate a batch by `beam_search`; with ``beam=1`` that is the greedy choice.

        A translation may have 10 tokens more than twice as many as the longest sentence.

        Parameters
        ----------
        xs : array of int32, shape (batch, length)
            Padded.
        beam : int
            Number of beginnings of a translation to keep.

        Returns
        -------
        list of (array of int32)
            The translations, in host memory, without an end of sentence.
        """
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            max_length = 2 * xs.shape[1] + 10
            return beam_search(self.begin(xs, beam), self.xp, len(xs), beam, max_length)


class TargetWords(chainer.Chain):
    """Vectors of the tokens that a decoder reads, and of those that it chooses from.

    Parameters
    ----------
    n_vocabulary, n_units : int
    shared : chainer.links.EmbedID, optional
        Embedding of the encoder, used here for both.
    """

    def __init__(self, n_vocabulary: int, n_units: int, shared: L.EmbedID | None = None) -> None:
        super().__init__()
        with self.init_scope():
            self.bias = chainer.Parameter(0, (n_vocabulary,))
            if shared is None:
                self.embed = embedding(n_vocabulary, n_units)
                self.output = embedding(n_vocabulary, n_units)
        if shared is not None:
            # Outside init_scope: as a child of two links it would be updated twice.
            self.embed = self.output = shared

    def read(self, tokens: np.ndarray) -> chainer.Variable:
        """Return the vectors of tokens: one more axis. Padding is read as `EOS`."""
        xp = chainer.backend.get_array_module(tokens)
        return self.embed(self.device.send(xp.maximum(tokens, EOS)))

    def score(self, hs: chainer.Variable) -> chainer.Variable:
        """Score all tokens for states of shape (batch, length, units).

        Returns
        -------
        chainer.Variable
            Scores of shape (batch * length, vocabulary), before the softmax.
        """
        return F.linear(F.reshape(hs, (-1, hs.shape[2])), self.output.W, self.bias)


def embedding(n_vocabulary: int, n_units: int) -> L.EmbedID:
    """Return vectors of about length 1: they are read, but may also score words."""
    return L.EmbedID(n_vocabulary, n_units, chainer.initializers.Normal(n_units**-0.5))


def nowhere(mask: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a term for energies that removes attention where ``mask`` is true.

    Far below all energies, and within float16: the softmax makes exactly 0 of it.
    """
    return np.where(mask, dtype.type(-1e4), dtype.type(0))


def shift(ys: np.ndarray) -> np.ndarray:
    """Return the decoder's input for writing each token of ``ys``, and then the end."""
    return np.pad(ys, ((0, 0), (1, 0)), constant_values=EOS)


def cross_entropy(scores: chainer.Variable, ys: np.ndarray) -> chainer.Variable:
    """Return the mean over the tokens of ``ys`` and the end of each sentence.

    Parameters
    ----------
    scores : chainer.Variable
        Scores from `Translator.decode`.
    ys : array of int32, shape (batch, target length)
    """
    scores = F.cast(scores, np.promote_types(scores.dtype, np.float32))
    right = scores.device.send(_with_end(ys).ravel())
    return F.softmax_cross_entropy(scores, right, ignore_label=PADDING)


def count_tokens(xs: np.ndarray, ys: np.ndarray) -> int:
    """Return the number of tokens, including the end of each translation."""
    return int((xs != PADDING).sum() + (ys != PADDING).sum()) + len(ys)


def _with_end(ys: np.ndarray) -> np.ndarray:
    ends = np.pad(ys, ((0, 0), (0, 1)), constant_values=PADDING)
    ends[np.arange(len(ys)), (ys != PADDING).sum(axis=1)] = EOS
    return ends
