"""The network: an encoder, and a decoder that attends to what it encoded."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

EOS, UNK = 0, 1  # the first two entries of every vocabulary
PADDING = -1

States = tuple[chainer.Variable, chainer.Variable]  # hidden and cell: (layers, batch, units)


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
            self.embed = L.EmbedID(n_vocabulary, n_units, _small(n_units))
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
            What there is to attend to, of shape (batch, length, units).
        """
        flat = F.dropout(self.embed(xs[xs != PADDING]), self.dropout)
        h, c, ys = self.lstm(None, None, F.split_axis(flat, _ends(xs), 0))
        return h, c, F.pad_sequence(ys, xs.shape[1])


class Decoder(chainer.Chain):
    """Writes sentences, with global attention (Luong et al., 2015).

    Parameters
    ----------
    n_vocabulary, n_units, n_layers : int
    dropout : float
    embed : chainer.links.EmbedID, optional
        Belongs to the encoder, and serves here for the words that are read and written.
    """

    def __init__(
        self,
        n_vocabulary: int,
        n_units: int,
        n_layers: int,
        dropout: float,
        embed: L.EmbedID | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.lstm = L.NStepLSTM(n_layers, n_units, n_units, dropout)
            self.align = L.Linear(n_units, n_units, nobias=True)
            self.combine = L.Linear(2 * n_units, n_units)
            self.bias = chainer.Parameter(0, (n_vocabulary,))
            if embed is None:
                self.embed = L.EmbedID(n_vocabulary, n_units, _small(n_units))
                self.output = L.EmbedID(n_vocabulary, n_units, _small(n_units))
        if embed is not None:
            # Outside init_scope: as a child of two links it would be updated twice.
            self.embed = self.output = embed

    def forward(
        self, states: States, memory: chainer.Variable, xs: np.ndarray, ys: np.ndarray
    ) -> tuple[chainer.Variable, chainer.Variable]:
        """Score every token of translations that are known.

        Parameters
        ----------
        states, memory
            From the encoder.
        xs, ys : array of int32, shapes (batch, source length) and (batch, target length)
            Padded. ``ys`` is without an end of sentence.

        Returns
        -------
        scores : chainer.Variable
            Of shape (batch * (target length + 1), vocabulary), before the softmax.
        weights : chainer.Variable
            Of attention; shape (batch, target length + 1, source length).
        """
        # What is read is shifted by one against what is to be written.
        read = self.xp.pad(ys, ((0, 0), (1, 0)), constant_values=EOS)
        flat = F.dropout(self.embed(self.xp.maximum(read, EOS)), self.dropout)
        hs = F.stack(self.lstm(*states, F.separate(flat))[2])
        return self._score(hs, memory, xs)

    def step(
        self, states: States, memory: chainer.Variable, xs: np.ndarray, last: np.ndarray
    ) -> tuple[States, chainer.Variable]:
        """Score what may follow the token ``last``, of shape (batch,).

        Returns
        -------
        states
            After it.
        scores : chainer.Variable
            Of shape (batch, vocabulary).
        """
        lstm = self.lstm
        h, c, (y,) = lstm.rnn(lstm.n_layers, 0, *states, lstm.ws, lstm.bs, [self.embed(last)])
        return (h, c), self._score(y[:, None], memory, xs)[0]

    def _score(
        self, hs: chainer.Variable, memory: chainer.Variable, xs: np.ndarray
    ) -> tuple[chainer.Variable, chainer.Variable]:
        energies = F.matmul(self.align(hs, n_batch_axes=2), memory, transb=True)
        nowhere = self.xp.where(xs == PADDING, np.float32(-1e9), np.float32(0))
        weights = F.softmax(energies + F.broadcast_to(nowhere[:, None], energies.shape), axis=2)
        both = F.concat([F.matmul(weights, memory), hs], axis=2)
        both = F.tanh(self.combine(F.dropout(both, self.dropout), n_batch_axes=2))
        flat = F.reshape(F.dropout(both, self.dropout), (-1, both.shape[2]))
        return F.linear(flat, self.output.W, self.bias), weights


class Seq2seq(chainer.Chain):
    """Translates.

    Parameters
    ----------
    n_source, n_target : int
        Sizes of the vocabularies.
    n_units, n_layers : int
    dropout : float
    share_embedding : bool
        The vocabularies are the same, and each token has one vector for all three uses.
    """

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
        h, c, memory = self.encoder(xs)
        scores, _ = self.decoder((h, c), memory, xs, ys)
        return cross_entropy(scores, ys)

    def attend(self, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
        """Return the weights of attention: (batch, target length + 1, source length)."""
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            h, c, memory = self.encoder(xs)
            return chainer.backends.cuda.to_cpu(self.decoder((h, c), memory, xs, ys)[1].array)

    def translate(self, xs: np.ndarray, beam: int = 1) -> list[np.ndarray]:
        """Translate a batch by beam search; with ``beam=1`` that is the greedy choice.

        A translation may have 10 tokens more than twice as many as the longest sentence.

        Parameters
        ----------
        xs : array of int32, shape (batch, length)
            Padded.
        beam : int
            How many beginnings of a translation to keep at a time. The best is in the end the
            one with the highest mean log-probability of a token.

        Returns
        -------
        list of (array of int32)
            The translations, in host memory, without an end of sentence.
        """
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return self._search(xs, 2 * xs.shape[1] + 10, beam)

    def _search(self, xs: np.ndarray, max_length: int, beam: int) -> list[np.ndarray]:
        xp, batch = self.xp, len(xs)
        h, c, memory = self.encoder(xs)
        # Row i * beam + j is beginning j of sentence i.
        rows = xp.repeat(xp.arange(batch), beam)
        h, c, memory, xs = h[:, rows], c[:, rows], memory[rows], xs[rows]
        first_rows = beam * xp.arange(batch)[:, None]
        tokens = xp.zeros((batch * beam, 0), np.int32)
        last = xp.full(batch * beam, EOS, np.int32)
        # Only one of them at the start, or all would stay the same.
        scores = xp.where(xp.arange(beam) == 0, np.float32(0), np.float32(-np.inf))
        scores = xp.tile(scores, (batch, 1))
        lengths = xp.zeros((batch, beam), np.int32)
        finished = xp.zeros((batch, beam), bool)
        for _ in range(max_length + 1):
            (h, c), out = self.decoder.step((h, c), memory, xs, last)
            log_p = F.log_softmax(out).array.reshape(batch, beam, -1)
            n_vocabulary = log_p.shape[2]
            # What is finished goes on with nothing but more ends, which cost nothing.
            end = xp.where(xp.arange(n_vocabulary) == EOS, np.float32(0), np.float32(-np.inf))
            log_p = xp.where(finished[:, :, None], end, log_p)
            totals = (scores[:, :, None] + log_p).reshape(batch, -1)
            best = xp.argpartition(-totals, beam - 1, axis=1)[:, :beam]
            scores = xp.take_along_axis(totals, best, axis=1)
            parents, last = best // n_vocabulary, (best % n_vocabulary).astype(np.int32)
            lengths = xp.take_along_axis(lengths + ~finished, parents, axis=1)
            finished = xp.take_along_axis(finished, parents, axis=1) | (last == EOS)
            rows, last = (first_rows + parents).ravel(), last.ravel()
            h, c = h[:, rows], c[:, rows]
            tokens = xp.concatenate([tokens[rows], last[:, None]], axis=1)
            if finished.all():
                break
        winners = first_rows[:, 0] + (scores / lengths).argmax(axis=1)
        chosen = chainer.backends.cuda.to_cpu(tokens[winners])
        return [row[: _first_end(row, max_length)] for row in chosen]


def cross_entropy(scores: chainer.Variable, ys: np.ndarray) -> chainer.Variable:
    """Return the mean over the tokens of ``ys`` and the end of each sentence.

    Parameters
    ----------
    scores : chainer.Variable
        From `Decoder`.
    ys : array of int32, shape (batch, target length)
    """
    return F.softmax_cross_entropy(scores, _with_end(ys).ravel(), ignore_label=PADDING)


def count_tokens(xs: np.ndarray, ys: np.ndarray) -> int:
    """Return how many tokens there are, with the end of each translation."""
    return int((xs != PADDING).sum() + (ys != PADDING).sum()) + len(ys)


def _small(n_units: int) -> chainer.initializers.Normal:
    # The default, 1, is for embeddings that are only read, and here they also score words.
    return chainer.initializers.Normal(n_units**-0.5)


def _with_end(ys: np.ndarray) -> np.ndarray:
    xp = chainer.backend.get_array_module(ys)
    ends = xp.pad(ys, ((0, 0), (0, 1)), constant_values=PADDING)
    ends[xp.arange(len(ys)), (ys != PADDING).sum(axis=1)] = EOS
    return ends


def _ends(xs: np.ndarray) -> list[int]:
    """Return where the rows are to be split that have been joined without their padding."""
    return (xs != PADDING).sum(axis=1).cumsum()[:-1].tolist()


def _first_end(row: np.ndarray, max_length: int) -> int:
    ends = np.flatnonzero(row == EOS)
    return int(ends[0]) if len(ends) else max_length
