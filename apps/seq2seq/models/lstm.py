"""LSTMs: an encoder, and a decoder that attends to the encoder's output."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from models.translator import TargetWords, Translator, embedding, nowhere, shift
from vocabulary import PADDING

States = tuple[chainer.Variable, chainer.Variable]  # hidden and cell: (layers, batch, units)


class LSTM(Translator):
    """Encoder-decoder of LSTMs with global attention (Luong et al., 2015).

    Parameters
    ----------
    n_source, n_target : int
        Sizes of the vocabularies.
    n_units, n_layers : int
    dropout : float
    share_embedding : bool
        Whether the vocabularies are the same and each token has one vector for all three uses.
    """

    @staticmethod
    def count_matrices(n_layers: int) -> int:
        """See `Translator`."""
        return 16 * n_layers + 3

    def __init__(
        self,
        n_source: int,
        n_target: int,
        n_units: int,
        n_layers: int = 1,
        dropout: float = 0,
        share_embedding: bool = False,
    ) -> None:
        super().__init__()
        with self.init_scope():
            self.encoder = Encoder(n_source, n_units, n_layers, dropout)
            shared = self.encoder.embed if share_embedding else None
            self.decoder = Decoder(n_target, n_units, n_layers, dropout, shared)

    def decode(self, xs: np.ndarray, ys: np.ndarray) -> tuple[chainer.Variable, chainer.Variable]:
        """See `Translator`."""
        h, c, memory = self.encoder(xs)
        return self.decoder((h, c), memory, xs, ys)

    def begin(self, xs: np.ndarray, beam: int = 1) -> "Recurrence":
        """See `Translator`."""
        h, c, memory = self.encoder(xs)
        rows = self.xp.repeat(self.xp.arange(len(xs)), beam)
        states = h[:, rows], c[:, rows]
        return Recurrence(self.decoder, states, memory[rows], np.repeat(xs, beam, axis=0))


class Encoder(chainer.Chain):
    """Reads sentences.

    Parameters
    ----------
    n_vocabulary, n_units, n_layers : int
    dropout : float
    """

    def __init__(self, n_vocabulary: int, n_units: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.embed = embedding(n_vocabulary, n_units)
            self.lstm = L.NStepLSTM(n_layers, n_units, n_units, dropout)

    def forward(self, xs: np.ndarray) -> tuple[chainer.Variable, ...]:
        """Encode a batch.

        Parameters
        ----------
        xs : array of int32, shape (batch, length)
            Each row ends with padding.

        Returns
        -------
        h, c : chainer.Variable
            The states after the last token, of shape (layers, batch, units).
        memory : chainer.Variable
            States to attend to, of shape (batch, length, units).
        """
        h, c, ys = self.lstm(None, None, self.read(xs))
        return h, c, F.pad_sequence(ys, xs.shape[1])

    def read(self, xs: np.ndarray) -> tuple[chainer.Variable, ...]:
        """Return the vectors of each sentence, of shape (its length, units)."""
        flat = self.device.send(xs[xs != PADDING])
        flat = F.dropout(self.embed(flat), self.dropout)
        return F.split_axis(flat, _ends(xs), 0)


class Decoder(chainer.Chain):
    """Writes sentences.

    Parameters
    ----------
    n_vocabulary, n_units, n_layers : int
    dropout : float
    shared : chainer.links.EmbedID, optional
        Embedding of the encoder, used here for the words that are read and written.
    """

    def __init__(
        self,
        n_vocabulary: int,
        n_units: int,
        n_layers: int,
        dropout: float,
        shared: L.EmbedID | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.words = TargetWords(n_vocabulary, n_units, shared)
            self.lstm = L.NStepLSTM(n_layers, n_units, n_units, dropout)
            self.align = L.Linear(n_units, n_units, nobias=True)
            self.combine = L.Linear(2 * n_units, n_units)

    def forward(
        self, states: States, memory: chainer.Variable, xs: np.ndarray, ys: np.ndarray
    ) -> tuple[chainer.Variable, chainer.Variable]:
        """Score every token of known translations, as `Translator.decode` does.

        Parameters
        ----------
        states, memory
            Results of the encoder.
        xs, ys : array of int32, shapes (batch, source length) and (batch, target length)
            Padded.
        """
        hs = F.stack(self.lstm(*states, self.read(ys))[2])
        return self.attend(hs, memory, xs)

    def read(self, ys: np.ndarray) -> tuple[chainer.Variable, ...]:
        """Return, for each translation, the vectors before each token and the end."""
        return F.separate(F.dropout(self.words.read(shift(ys)), self.dropout))

    def attend(
        self, hs: chainer.Variable, memory: chainer.Variable, xs: np.ndarray
    ) -> tuple[chainer.Variable, chainer.Variable]:
        """Return the scores and weights of states of shape (batch, target length, units)."""
        energies = F.matmul(self.align(hs, n_batch_axes=2), memory, transb=True)
        outside = self.device.send(nowhere(xs == PADDING, energies.dtype)[:, None])
        weights = F.softmax(energies + F.broadcast_to(outside, energies.shape), axis=2)
        both = F.concat([F.matmul(weights, memory), hs], axis=2)
        both = F.tanh(self.combine(F.dropout(both, self.dropout), n_batch_axes=2))
        return self.words.score(F.dropout(both, self.dropout)), weights


class Recurrence:
    """A `Decoding`: the states after the last token of each row.

    Parameters
    ----------
    decoder : Decoder
    states, memory
        Results of the encoder, with a row for each translation.
    xs : array of int32, shape (rows, source length)
    """

    def __init__(
        self, decoder: Decoder, states: States, memory: chainer.Variable, xs: np.ndarray
    ) -> None:
        self.decoder, self.states, self.memory, self.xs = decoder, states, memory, xs

    def step(self, last: np.ndarray) -> chainer.Variable:
        """See `Decoding`."""
        lstm, read = self.decoder.lstm, self.decoder.words.read(last)
        h, c, (y,) = lstm.rnn(lstm.n_layers, 0, *self.states, lstm.ws, lstm.bs, [read])
        self.states = h, c
        return self.decoder.attend(y[:, None], self.memory, self.xs)[0]

    def select(self, rows: np.ndarray) -> None:
        """See `Decoding`."""
        h, c = self.states
        self.states = h[:, rows], c[:, rows]


def _ends(xs: np.ndarray) -> list[int]:
    """Return where to split the rows that were joined without their padding."""
    return (xs != PADDING).sum(axis=1).cumsum()[:-1].tolist()
