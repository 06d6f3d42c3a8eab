"""The Transformer (Vaswani et al., 2017), with normalization before each layer."""

import math
from typing import ClassVar

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from models.translator import TargetWords, Translator, embedding, nowhere, shift
from vocabulary import PADDING

KeysValues = tuple[chainer.Variable, chainer.Variable]  # each (batch, heads, length, units/heads)


class Transformer(Translator):
    """Encoder and decoder, built from attention.

    Normalization comes before attention and feed-forward layers, not after them (Xiong et al.,
    2020). The feed-forward layers are four times as wide as the others. The attention that
    `decode` returns is that of the last layer to the source, the mean of its heads.

    Parameters
    ----------
    n_source, n_target : int
        Sizes of the vocabularies.
    n_units, n_layers : int
    dropout : float
    share_embedding : bool
        Whether the vocabularies are the same and each token has one vector for all three uses.
    n_heads : int
        Number of heads of each attention, which divides ``n_units``.

    Raises
    ------
    ValueError
        If ``n_units`` is odd, or not a multiple of ``n_heads``.
    """

    SIZES: ClassVar[dict[str, object]] = {**Translator.SIZES, "n_heads": range(1, 1 << 10)}

    @staticmethod
    def count_matrices(n_layers: int) -> int:
        """See `Translator`."""
        return 28 * n_layers

    def __init__(
        self,
        n_source: int,
        n_target: int,
        n_units: int,
        n_layers: int = 1,
        dropout: float = 0,
        share_embedding: bool = False,
        n_heads: int = 4,
    ) -> None:
        super().__init__()
        if n_units % n_heads or n_units % 2:
            raise ValueError(
                f"a Transformer needs an even number of units that its heads can share, but got "
                f"{n_units} units and {n_heads} heads"
            )
        self.dropout = dropout
        with self.init_scope():
            self.embed = embedding(n_source, n_units)
            self.words = TargetWords(n_target, n_units, self.embed if share_embedding else None)
            self.encoder = chainer.ChainList(
                *(EncoderLayer(n_units, n_heads, dropout) for _ in range(n_layers))
            )
            self.decoder = chainer.ChainList(
                *(DecoderLayer(n_units, n_heads, dropout) for _ in range(n_layers))
            )
            self.norm_of_encoder = Norm(n_units)
            self.norm_of_decoder = Norm(n_units)

    def encode(self, xs: np.ndarray) -> tuple[chainer.Variable, np.ndarray]:
        """Return the states to attend to, and a mask that is added to energies to ignore padding.

        Their shapes are (batch, length, units) and (batch, 1, 1, length).
        """
        hs = self.place(self.embed(self.device.send(np.maximum(xs, 0))))
        outside = self.device.send(nowhere(xs == PADDING, hs.dtype)[:, None, None])
        for layer in self.encoder:
            hs = layer(hs, outside)
        return self.norm_of_encoder(hs), outside

    def decode(self, xs: np.ndarray, ys: np.ndarray) -> tuple[chainer.Variable, chainer.Variable]:
        """See `Translator`."""
        memory, outside = self.encode(xs)
        hs = self.place(self.words.read(shift(ys)))
        later = np.triu(np.ones((hs.shape[1], hs.shape[1]), bool), 1)
        later = self.device.send(nowhere(later, hs.dtype))
        for layer in self.decoder:
            source = layer.over_source.project(memory)
            hs, _, weights = layer(hs, None, later, source, outside)
        return self.words.score(self.norm_of_decoder(hs)), F.mean(weights, axis=1)

    def begin(self, xs: np.ndarray, beam: int = 1) -> "Cache":
        """See `Translator`."""
        memory, outside = self.encode(xs)
        rows = self.xp.repeat(self.xp.arange(len(xs)), beam)
        return Cache(self, memory[rows], outside[rows])

    def place(self, vectors: chainer.Variable, first: int = 0) -> chainer.Variable:
        """Add positions, counted from ``first``, to vectors of shape (batch, length, units)."""
        n_units = vectors.shape[2]
        places = self.xp.arange(first, first + vectors.shape[1])[:, None]
        angles = places / 1e4 ** (self.xp.arange(0, n_units, 2) / n_units)
        waves = self.xp.concatenate([self.xp.sin(angles), self.xp.cos(angles)], axis=1)
        waves = self.xp.broadcast_to(waves.astype(vectors.dtype), vectors.shape)
        return F.dropout(vectors * math.sqrt(n_units) + waves, self.dropout)


class Norm(L.LayerNormalization):
    """Layer normalization of vectors of shape (batch, length, units)."""

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Normalize each vector, in float32 at least: squares may be too large for float16."""
        wide = np.promote_types(x.dtype, np.float32)
        flat = F.cast(F.reshape(x, (-1, x.shape[2])), wide)
        gamma, beta = F.cast(self.gamma, wide), F.cast(self.beta, wide)
        found = F.layer_normalization(flat, gamma, beta, self.eps)
        return F.reshape(F.cast(found, x.dtype), x.shape)


class Attention(chainer.Chain):
    """Attention of several heads.

    Parameters
    ----------
    n_units, n_heads : int
    """

    def __init__(self, n_units: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        with self.init_scope():
            self.query = L.Linear(n_units, n_units)
            self.key = L.Linear(n_units, n_units)
            self.value = L.Linear(n_units, n_units)
            self.output = L.Linear(n_units, n_units)

    def project(self, memory: chainer.Variable) -> KeysValues:
        """Return keys and values of the states to attend to: (batch, length, units)."""
        keys, values = self.key(memory, n_batch_axes=2), self.value(memory, n_batch_axes=2)
        return self._split(keys), self._split(values)

    def forward(
        self, hs: chainer.Variable, memory: KeysValues, outside: np.ndarray | None
    ) -> tuple[chainer.Variable, chainer.Variable]:
        """Attend from states of shape (batch, length, units).

        Parameters
        ----------
        hs : chainer.Variable
        memory : tuple of chainer.Variable
            Keys and values from `project`.
        outside : array or None
            Term to add to the energies; it can be broadcast to their shape.

        Returns
        -------
        chainer.Variable
            Result with the shape of ``hs``.
        weights : chainer.Variable
            Weights of shape (batch, heads, length, length of the memory).
        """
        keys, values = memory
        queries = self._split(self.query(hs, n_batch_axes=2))
        energies = F.matmul(queries, keys, transb=True) * queries.shape[3] ** -0.5
        if outside is not None:
            energies += self.xp.broadcast_to(outside, energies.shape)
        weights = F.softmax(energies, axis=3)
        heads = F.transpose(F.matmul(weights, values), (0, 2, 1, 3))
        return self.output(F.reshape(heads, hs.shape), n_batch_axes=2), weights

    def _split(self, hs: chainer.Variable) -> chainer.Variable:
        batch, length, n_units = hs.shape
        heads = F.reshape(hs, (batch, length, self.n_heads, n_units // self.n_heads))
        return F.transpose(heads, (0, 2, 1, 3))


class FeedForward(chainer.Chain):
    """Two linear layers, for each vector by itself.

    Parameters
    ----------
    n_units : int
    """

    def __init__(self, n_units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.inner = L.Linear(n_units, 4 * n_units)
            self.outer = L.Linear(4 * n_units, n_units)

    def forward(self, hs: chainer.Variable) -> chainer.Variable:
        """Map vectors of shape (batch, length, units)."""
        return self.outer(F.relu(self.inner(hs, n_batch_axes=2)), n_batch_axes=2)


class EncoderLayer(chainer.Chain):
    """Attention to the whole sentence, then a feed-forward layer.

    Parameters
    ----------
    n_units, n_heads : int
    dropout : float
    """

    def __init__(self, n_units: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.over_itself = Attention(n_units, n_heads)
            self.feed_forward = FeedForward(n_units)
            self.norm1, self.norm2 = Norm(n_units), Norm(n_units)

    def forward(self, hs: chainer.Variable, outside: np.ndarray) -> chainer.Variable:
        """Map states of shape (batch, length, units)."""
        normal = self.norm1(hs)
        found, _ = self.over_itself(normal, self.over_itself.project(normal), outside)
        hs += F.dropout(found, self.dropout)
        return hs + F.dropout(self.feed_forward(self.norm2(hs)), self.dropout)


class DecoderLayer(chainer.Chain):
    """Attention to what has been written and to the source, then a feed-forward layer.

    Parameters
    ----------
    n_units, n_heads : int
    dropout : float
    """

    def __init__(self, n_units: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.over_itself = Attention(n_units, n_heads)
            self.over_source = Attention(n_units, n_heads)
            self.feed_forward = FeedForward(n_units)
            self.norm1, self.norm2, self.norm3 = Norm(n_units), Norm(n_units), Norm(n_units)

    def forward(
        self,
        hs: chainer.Variable,
        past: KeysValues | None,
        later: np.ndarray | None,
        source: KeysValues,
        outside: np.ndarray,
    ) -> tuple[chainer.Variable, KeysValues, chainer.Variable]:
        """Map states of shape (batch, length, units).

        Parameters
        ----------
        hs : chainer.Variable
        past : tuple of chainer.Variable, optional
            Keys and values of the states before these.
        later : array or None
            Term to add to the energies of the states, as for `Attention`.
        source : tuple of chainer.Variable
            Keys and values of the source, from ``over_source.project``.
        outside : array
            Term to add to the energies of the source.

        Returns
        -------
        chainer.Variable
            Result with the shape of ``hs``.
        own : tuple of chainer.Variable
            Keys and values of the past and these states.
        weights : chainer.Variable
            Weights of the attention to the source.
        """
        normal = self.norm1(hs)
        own = self.over_itself.project(normal)
        if past is not None:
            own = F.concat([past[0], own[0]], axis=2), F.concat([past[1], own[1]], axis=2)
        found, _ = self.over_itself(normal, own, later)
        hs += F.dropout(found, self.dropout)
        found, weights = self.over_source(self.norm2(hs), source, outside)
        hs += F.dropout(found, self.dropout)
        return hs + F.dropout(self.feed_forward(self.norm3(hs)), self.dropout), own, weights


class Cache:
    """A `Decoding`: keys and values of all tokens that have been written.

    Parameters
    ----------
    network : Transformer
    memory : chainer.Variable
        States from its `encode`, with a row for each translation.
    outside : array
        Mask from its `encode`, with a row for each translation.
    """

    def __init__(
        self, network: Transformer, memory: chainer.Variable, outside: np.ndarray
    ) -> None:
        self.network, self.outside = network, outside
        self.source = [layer.over_source.project(memory) for layer in network.decoder]
        self.own: list[KeysValues | None] = [None] * len(network.decoder)
        self.length = 0

    def step(self, last: np.ndarray) -> chainer.Variable:
        """See `Decoding`."""
        network = self.network
        hs = network.place(network.words.read(last[:, None]), self.length)
        for i, layer in enumerate(network.decoder):
            hs, self.own[i], _ = layer(hs, self.own[i], None, self.source[i], self.outside)
        self.length += 1
        return network.words.score(network.norm_of_decoder(hs))

    def select(self, rows: np.ndarray) -> None:
        """See `Decoding`. The source of a row stays the same."""
        self.own = [(keys[rows], values[rows]) for keys, values in self.own]
