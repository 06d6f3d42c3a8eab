"""Send each rank only its own rows of a data set made of columns."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from chainer.datasets import DictDataset, SubDataset, TupleDataset
from numpy.typing import NDArray

from chainermn.agreement import run_together
from chainermn.communicators.communicator_base import CommunicatorBase

Column: TypeAlias = "NDArray[Any] | list[Any]"
Indices: TypeAlias = NDArray[np.intp]

# Size of the rows of all ranks in one round. Larger rounds are not faster, and each rank holds a
# round in addition to its part.
_ROUND_BYTES = 32 * 2**20


@dataclass
class Columns:
    """A data set as columns: example ``i`` consists of row ``rows[i]`` of each column.

    ``assemble`` turns a list of columns into a data set of the same kind.
    """

    columns: list[Column]
    rows: Indices
    assemble: Callable[[list[Column]], Any]

    @classmethod
    def of(cls, dataset: Any) -> Columns | None:
        """Return the columns of a data set, or None if it has none.

        Arrays, lists, a `TupleDataset` or `DictDataset` of these, and a `SubDataset` of one of
        those have columns. Instances of subclasses do not: their ``[]`` may do anything.

        Raises
        ------
        TypeError
            If a column is of pandas or the like, and its ``[]`` takes no positions.
        """
        if type(dataset) is SubDataset:
            base = cls.of(dataset._dataset)
            if base is not None:
                part = slice(dataset._start, dataset._finish)
                order = dataset._order
                base.rows = base.rows[part if order is None else np.asarray(order, np.intp)[part]]
            return base
        assemble: Callable[[list[Column]], Any]
        if type(dataset) is TupleDataset:
            columns, assemble = list(dataset._datasets), _assemble_tuples
        elif type(dataset) is DictDataset:
            columns = list(dataset._datasets.values())
            assemble = partial(_assemble_dict, list(dataset._datasets))
        else:
            columns, assemble = [dataset], operator.itemgetter(0)
        for column in columns:
            _refuse_labels(column)
        if not all(_is_column(column) for column in columns):
            return None
        return cls(columns, np.arange(len(dataset)), assemble)

    def round_length(self, max_bytes: int, n_ranks: int) -> int:
        """Return the number of examples per rank in a round of at most ``max_bytes``."""
        limit = min(max_bytes, _ROUND_BYTES) // n_ranks
        limit -= limit // 64  # room for headers
        return max(1, limit // max(1, sum(map(_row_bytes, self.columns))))

    def take(self, part: slice) -> list[Column]:
        """Return the columns of some examples."""
        rows = self.rows[part]
        return [
            column[rows]
            if isinstance(column, np.ndarray)
            else list(map(column.__getitem__, rows.tolist()))
            for column in self.columns
        ]


def scatter_columns(
    columns: Columns | None,
    bounds: Sequence[tuple[int, int]],
    round_length: int,
    comm: CommunicatorBase,
    root: int,
) -> list[Column]:
    """Return the columns of the examples ``range(*bounds[comm.rank])`` of ``root``'s ``columns``.

    Raises on every rank if ``root`` cannot read or pickle an example.
    """

    def take(start: int) -> list[list[Column] | None] | None:
        if columns is None:
            return None
        return [
            columns.take(slice(begin + start, min(begin + start + round_length, end)))
            for begin, end in bounds
        ]

    begin, end = bounds[comm.rank]
    own: list[Column] = []

    # A function, because a chunk that still has a name would stay in memory during the next one.
    def receive(start: int) -> None:
        chunks = run_together(comm, "scatter_dataset", partial(take, start))
        kept: Any = None
        if chunks is not None:  # the root does not pickle its own chunk
            kept, chunks[root] = chunks[root], None
        chunk = comm.scatter_obj(chunks, root=root) or kept
        # Joining all chunks at the end would take twice the memory.
        own.extend(_room_for(column, end - begin) for column in chunk if not start)
        for column, rows in zip(own, chunk, strict=True):
            column[start : start + len(rows)] = rows

    longest = max(end - begin for begin, end in bounds)
    for start in range(0, max(1, longest), round_length):
        receive(start)
    return own


def _room_for(chunk: Column, length: int) -> Column:
    if isinstance(chunk, list):
        return []
    return np.empty((length, *chunk.shape[1:]), chunk.dtype)


def _is_column(column: Any) -> bool:
    if type(column) in (np.ndarray, np.memmap):
        return bool(column.ndim)
    return type(column) is list


def _refuse_labels(column: Any) -> None:
    """Refuse what finds rows by labels or columns by names: it would be mixed up, or fail."""
    if not hasattr(column, "to_numpy"):
        return
    if hasattr(column, "columns"):
        raise TypeError(
            f"a {type(column).__name__} is a set of columns, not of examples: pass "
            "TupleDataset(df[INPUTS].to_numpy('f'), df[LABEL].to_numpy('i')), or "
            "df.to_records(index=False)"
        )
    index = getattr(column, "index", None)
    if index is not None and not np.array_equal(index, np.arange(len(column))):
        raise TypeError(
            f"a {type(column).__name__} finds examples by its index, which is not 0, 1, 2, ...: "
            "pass its to_numpy()"
        )


def _row_bytes(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.itemsize * int(np.prod(column.shape[1:]))
    try:
        return len(pickle.dumps(column[0], protocol=5)) if column else 0
    except Exception:  # scatter_obj will tell all ranks
        return 0


def _assemble_tuples(columns: list[Column]) -> TupleDataset:
    return TupleDataset(*columns)


def _assemble_dict(keys: list[str], columns: list[Column]) -> DictDataset:
    return DictDataset(**dict(zip(keys, columns, strict=True)))
