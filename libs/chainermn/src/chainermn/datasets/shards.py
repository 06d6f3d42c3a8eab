"""Send each rank only its own rows of a data set made of columns."""

from __future__ import annotations

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

# Of the rows of all ranks in one round. Larger rounds are no faster, and each rank holds a round
# in addition to its part.
_ROUND_BYTES = 32 * 2**20


@dataclass
class Columns:
    """A data set taken apart.

    Attributes
    ----------
    columns : list of (ndarray or list)
        All of the same length.
    rows : ndarray of int, optional
        Example ``i`` is row ``rows[i]``; row ``i`` by default.
    assemble : callable
        Makes a data set of the same kind from a list of columns.
    """

    columns: list[Column]
    rows: Indices | None
    assemble: Callable[[list[Column]], Any]

    @classmethod
    def of(cls, dataset: Any) -> Columns | None:
        """Take a data set apart; return None if it is not made of columns.

        Arrays, lists, a `TupleDataset` or `DictDataset` of these, and a `SubDataset` of one of
        those are made of columns. Instances of subclasses are not: their ``[]`` may do anything.
        """
        if type(dataset) is SubDataset:
            return cls._of_subset(dataset)
        if type(dataset) is TupleDataset:
            columns, assemble = list(dataset._datasets), _assemble_tuples
        elif type(dataset) is DictDataset:
            columns = list(dataset._datasets.values())
            assemble = _DictAssembler(list(dataset._datasets))
        else:
            columns, assemble = [dataset], _assemble_bare
        if not all(_is_column(column) for column in columns):
            return None
        return cls(columns, None, assemble)

    @classmethod
    def _of_subset(cls, subset: SubDataset) -> Columns | None:
        base = cls.of(subset._dataset)
        if base is None:
            return None
        part = slice(subset._start, subset._finish)
        order = np.arange(part.stop) if subset._order is None else np.asarray(subset._order)
        rows = order[part].astype(np.intp)
        return cls(base.columns, rows if base.rows is None else base.rows[rows], base.assemble)

    def row_bytes(self) -> int:
        """Return about how many bytes an example takes on the wire."""
        return sum(_row_bytes(column) for column in self.columns)

    def take(self, examples: Indices) -> list[Column]:
        """Return the columns of the examples with these indices."""
        rows = examples if self.rows is None else self.rows[examples]
        return [
            column[rows]
            if isinstance(column, np.ndarray)
            else list(map(column.__getitem__, rows.tolist()))
            for column in self.columns
        ]


def scatter_columns(
    columns: Columns | None,
    parts: Sequence[Indices] | None,
    comm: CommunicatorBase,
    root: int,
    max_bytes: int,
) -> Any:
    """Give rank ``i`` the examples ``parts[i]`` of the data set of ``root``.

    Parameters
    ----------
    columns : Columns
        On ``root``; ignored elsewhere.
    parts : sequence of (ndarray of int)
        On ``root``, one entry per rank; ignored elsewhere.
    comm : CommunicatorBase
    root : int
    max_bytes : int
        ``root`` copies at most this many bytes of examples at a time.

    Returns
    -------
    data set
        Of the same kind as the one that was taken apart.

    Raises
    ------
    TypeError
        On every rank, if an example that another rank gets cannot be pickled.
    Exception
        On every rank, if ``root`` cannot read an example.
    """

    def plan() -> tuple[Any, list[int], int] | None:
        if columns is None or parts is None:
            return None
        limit = min(max_bytes, _ROUND_BYTES) // comm.size
        limit -= limit // 64  # room for headers
        step = max(1, limit // max(1, columns.row_bytes()))
        return columns.assemble, [len(part) for part in parts], step

    def take(start: int, step: int) -> list[Any] | None:
        if columns is None or parts is None:
            return None
        return [columns.take(part[start : start + step]) for part in parts]

    where = "scatter_dataset"
    header = run_together(comm, where, plan)
    assemble, lengths, step = comm.bcast_obj(header, root=root)
    own = _Collector(lengths[comm.rank])
    for start in range(0, max(1, *lengths), step):
        own.add(_scatter_round(run_together(comm, where, partial(take, start, step)), comm, root))
    return assemble(own.columns)


def _scatter_round(chunks: list[Any] | None, comm: CommunicatorBase, root: int) -> list[Column]:
    """Give each rank its chunk; the root keeps its own without pickling it."""
    kept = None
    if chunks is not None:
        kept, chunks[root] = chunks[root], None
    received = comm.scatter_obj(chunks, root=root)
    return received if kept is None else kept


class _Collector:
    """Joins the chunks of a part without holding all of them at once."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._filled = 0
        self.columns: list[Column] = []

    def add(self, chunk: list[Column]) -> None:
        if not self.columns:
            self.columns = [self._room_for(column) for column in chunk]
        for column, rows in zip(self.columns, chunk, strict=True):
            if isinstance(column, list):
                column.extend(rows)
            else:
                column[self._filled : self._filled + len(rows)] = rows
        self._filled += len(chunk[0])

    def _room_for(self, chunk: Column) -> Column:
        if isinstance(chunk, list):
            return []
        return np.empty((self._length, *chunk.shape[1:]), chunk.dtype)


def _is_column(column: Any) -> bool:
    if type(column) in (np.ndarray, np.memmap):
        return bool(column.ndim)
    return type(column) is list


def _row_bytes(column: Column) -> int:
    if isinstance(column, np.ndarray):
        return column.itemsize * int(np.prod(column.shape[1:]))
    try:
        return len(pickle.dumps(column[0], protocol=5)) if column else 0
    except Exception:  # scatter_obj will tell all ranks
        return 0


def _assemble_bare(columns: list[Column]) -> Column:
    return columns[0]


def _assemble_tuples(columns: list[Column]) -> TupleDataset:
    return TupleDataset(*columns)


@dataclass
class _DictAssembler:
    keys: list[str]

    def __call__(self, columns: list[Column]) -> DictDataset:
        return DictDataset(**dict(zip(self.keys, columns, strict=True)))
