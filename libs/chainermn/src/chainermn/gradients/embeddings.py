"""Send only those rows of an embedding's gradient that a batch has used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn.transport.collectives import Collectives
from chainermn.transport.gpu.device import on_gpu
from chainermn.transport.host.arithmetic import Adder, divide
from chainermn.transport.reducer import Array, Steps

if TYPE_CHECKING:
    from chainer.variable import VariableNode


def embeddings_of(model: chainer.Link) -> frozenset[VariableNode]:
    """Return the nodes of parameters in host memory of which a batch uses only some rows."""
    weights = [each.W for each in model.links() if isinstance(each, chainer.links.EmbedID)]
    return frozenset(each.node for each in weights if not on_gpu(each.array))


class EmbeddingBucket:
    """The gradient of an embedding, in host memory; see `Bucket` for the rest.

    All ranks send each other the rows that are not zero, if these take fewer bytes than an
    all-reduce sends. The means have the same bits either way, if the all-reduce sums in rank
    order.
    """

    on_gpu = False

    def __init__(
        self,
        members: Sequence[int],
        parameter: chainer.Parameter,
        wire_dtype: np.dtype[Any] | None,
    ) -> None:
        self.members = members
        self._shape = len(parameter.array), -1
        self._dtype = parameter.dtype
        self._wire_dtype = wire_dtype or parameter.dtype

    def gather(self, gradients: Sequence[Array]) -> None:
        """Take a one-dimensional contiguous gradient, which must not change until `scatter`."""
        (gradient,) = gradients
        self._gradient = gradient.reshape(self._shape)

    def exchange(self, collectives: Collectives) -> Steps:
        """Average the gradient over the ranks."""
        self._rows = np.flatnonzero(self._gradient.any(axis=1))
        counts = yield from collectives.allgather(np.array([len(self._rows)]))
        n_rows = int(counts.max())
        n_bytes = self._gradient.size * self._wire_dtype.itemsize
        bytes_per_row = np.uint32().nbytes + n_bytes // len(self._gradient)
        # An all-reduce sends 2 (N - 1) / N times all bytes; this sends N - 1 times those of rows.
        if collectives.size * n_rows * bytes_per_row < 2 * n_bytes:
            yield from self._exchange_rows(counts[:, 0], n_rows, collectives)
        else:
            dense = self._gradient.reshape(-1).copy()
            yield from collectives.mean(dense)
            self._mean_rows = np.arange(len(self._gradient))
            self._mean = dense.reshape(self._shape)

    def scatter(self, gradients: Sequence[Array]) -> None:
        """Write the mean into the gradient."""
        (gradient,) = gradients
        matrix = gradient.reshape(self._shape)
        matrix[self._rows] = 0
        matrix[self._mean_rows] = self._mean

    def _exchange_rows(self, counts: Array, n_rows: int, collectives: Collectives) -> Steps:
        adder, width = collectives.adder, self._gradient.shape[1]
        indices = np.zeros(n_rows, np.uint32)
        indices[: len(self._rows)] = self._rows
        values = np.zeros(n_rows * width, self._wire_dtype)
        own = self._gradient[self._rows].reshape(-1)
        adder.copy(own, values[: own.size])
        all_indices = yield from collectives.allgather(indices)
        all_values = yield from collectives.allgather(values.view(np.uint8))
        rows = [of_rank[:count] for of_rank, count in zip(all_indices, counts, strict=True)]
        parts = [
            of_rank.view(self._wire_dtype)[: count * width]
            for of_rank, count in zip(all_values, counts, strict=True)
        ]
        self._mean_rows = np.unique(np.concatenate(rows))
        mean = _mean(self._mean_rows, rows, parts, width, adder)
        self._mean = np.empty((len(self._mean_rows), width), self._dtype)
        adder.copy(mean, self._mean.reshape(-1))


@np.errstate(all="ignore")  # a warning turned into an error would stop only one rank
def _mean(
    union: Array, rows: Sequence[Array], parts: Sequence[Array], width: int, adder: Adder
) -> Array:
    """Return the means of the rows in ``union``, summed and rounded as an all-reduce does."""
    wire_dtype = parts[0].dtype
    total = np.zeros((len(union), width), np.float32 if wire_dtype.itemsize == 2 else wire_dtype)
    for of_rank, part in zip(rows, parts, strict=True):
        addend = np.empty(part.size, total.dtype)
        adder.copy(part, addend)
        total[np.searchsorted(union, of_rank)] += addend.reshape(-1, width)
    divide(total, len(parts))
    rounded = np.empty(total.size, wire_dtype)
    adder.copy(total.reshape(-1), rounded)
    return rounded
