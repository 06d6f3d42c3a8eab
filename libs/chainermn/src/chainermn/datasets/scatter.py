"""Scatter a data set that one rank has."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn.agreement import check_root, run_on_root
from chainermn.communicators import CommunicatorBase, create_communicator
from chainermn.datasets.shards import Columns, Indices, scatter_columns

if TYPE_CHECKING:
    from mpi4py import MPI


class DataSizeError(RuntimeError):
    """Never raised. Kept for scripts that catch it: there is no limit on the size any more."""


def scatter_dataset(
    dataset: Sequence[Any] | None,
    comm: CommunicatorBase | MPI.Intracomm,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> SubDataset:
    """Divide the data set of one rank among all ranks.

    Parameters
    ----------
    dataset : sequence
        On ``root``, anything with ``len`` and ``[]`` that can be pickled; ignored elsewhere.
    comm : CommunicatorBase or mpi4py.MPI.Intracomm
        Scripts written for ChainerMN 1.0 give the second.
    root : int
        The rank that has the data set. The arguments below are taken from it too.
    shuffle : bool
        Take the examples in random order.
    seed : int, optional
        Seed of that order; by default, the order is different each time.
    max_buf_len : int
        ``root`` copies and sends at most this many bytes of arrays at a time.
    force_equal_length : bool
        Give all ranks the same number of examples: some examples go to two ranks, if the number
        of ranks does not divide the number of examples. Otherwise ranks may differ by one
        example, and some have none if there are fewer examples than ranks.

    Returns
    -------
    chainer.datasets.SubDataset
        The examples of this rank.

    Raises
    ------
    TypeError
        On every rank, if the data set of ``root`` has no length, or examples that another rank
        is to get cannot be pickled.
    ValueError
        On every rank, if ``root`` is not the same rank everywhere.

    Notes
    -----
    If the data set is an array, a list, a ``TupleDataset`` or ``DictDataset`` of these, or a
    ``SubDataset`` of one of those, each rank receives and holds only its own examples. Any other
    data set is sent whole to every rank, since it may compute its examples in any way: it should
    read them on demand.
    """
    where = "scatter_dataset"
    if not isinstance(comm, CommunicatorBase):
        comm = create_communicator("naive", comm)
    check_root(comm, root, where)

    columns: Columns | None = None
    order: Indices | None = None

    def plan() -> tuple[int, bool, tuple[Any, int] | None]:
        nonlocal columns, order
        try:
            n = len(dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"rank {root} must give a data set with a length: {error}") from None
        order = np.random.RandomState(seed).permutation(n) if shuffle else None
        columns = Columns.of(SubDataset(dataset, 0, n, order)) if comm.size > 1 else None
        if columns is None:
            return n, force_equal_length, None
        rounds = columns.round_length(max_buf_len, comm.size)
        return n, force_equal_length, (columns.assemble, rounds)

    n, force_equal_length, by_columns = run_on_root(comm, root, where, plan)
    bounds = [part_bounds(n, rank, comm.size, force_equal_length) for rank in range(comm.size)]
    begin, end = bounds[comm.rank]
    if by_columns:
        assemble, round_length = by_columns
        own = scatter_columns(columns, bounds, round_length, comm, root)
        return SubDataset(assemble(own), 0, end - begin)
    if comm.size > 1:
        dataset, order = comm.bcast_obj((dataset, order), max_buf_len=max_buf_len, root=root)
    return SubDataset(dataset, begin, end, order)


def scatter_index(
    n_total_samples: int, comm: CommunicatorBase, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Divide ``range(n_total_samples)`` among all ranks.

    Parameters
    ----------
    n_total_samples : int
        Number of examples, on ``root``; ignored elsewhere.
    comm : CommunicatorBase
    root : int
    force_equal_length : bool
        As for `scatter_dataset`.

    Returns
    -------
    (begin, end) : tuple of int
        The part of this rank is ``range(begin, end)``.

    Raises
    ------
    TypeError, ValueError
        On every rank, if ``n_total_samples`` of ``root`` is not a number of examples, or ``root``
        is not the same rank everywhere.
    """
    where = "scatter_index"
    check_root(comm, root, where)

    def check() -> tuple[int, bool]:
        n = operator.index(n_total_samples)
        if n < 0:
            raise ValueError(f"the number of examples must not be negative, got {n}")
        return n, force_equal_length

    n, is_equal = run_on_root(comm, root, where, check)
    return part_bounds(n, comm.rank, comm.size, is_equal)


def get_n_iterations_for_one_epoch(
    dataset: Sized, local_batch_size: int, comm: CommunicatorBase
) -> int:
    """Return, on every rank, the number of batches in the part of rank 0, ``dataset``.

    Raises TypeError or ValueError on every rank, if the arguments of rank 0 are invalid.

    .. deprecated:: 1.0
        Give the trainer a number of epochs, ``(n, 'epoch')``.
    """
    _warn("get_n_iterations_for_one_epoch", 1)
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: CommunicatorBase
) -> tuple[int, str]:
    """Return, on every rank, a trigger that fires every ``n_epochs`` epochs of rank 0.

    Raises TypeError or ValueError on every rank, if the arguments of rank 0 are invalid.

    .. deprecated:: 1.0
        Give the trainer ``(n_epochs, 'epoch')``.
    """
    _warn("get_epoch_trigger", n_epochs)
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), "iteration"


def part_bounds(n: int, rank: int, size: int, force_equal_length: bool) -> tuple[int, int]:
    """Return where the part of ``rank`` in ``range(n)`` begins and ends."""
    if force_equal_length:
        begin = n * rank // size
        return begin, begin + -(-n // size)
    # As the original does: the first ranks have one more.
    each, remainder = divmod(n, size)
    begin = rank * each + min(rank, remainder)
    return begin, begin + each + (rank < remainder)


def _warn(name: str, n_epochs: int) -> None:
    message = f"{name} is deprecated: give the trainer ({n_epochs}, 'epoch') instead"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _n_iterations(dataset: Sized, local_batch_size: int, comm: CommunicatorBase) -> int:
    def count() -> int:
        if local_batch_size < 1:
            raise ValueError(f"the batch size must be positive, got {local_batch_size}")
        return -(-len(dataset) // local_batch_size)

    return run_on_root(comm, 0, "get_n_iterations_for_one_epoch", count)
