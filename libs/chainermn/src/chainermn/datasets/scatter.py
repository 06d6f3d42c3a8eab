"""Give each rank its part of a data set that one rank has."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn.agreement import check_root, run_together
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.datasets.shards import Columns, Indices, scatter_columns

if TYPE_CHECKING:
    from mpi4py import MPI

    from chainermn.communicators.communicator_base import CommunicatorBase


class DataSizeError(RuntimeError):
    """A data set is too large to be sent. Kept for scripts that catch it; never raised."""


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
        The second is for scripts written for ChainerMN 1.0.
    root : int
        The rank that has the data set. Its other arguments count, not those of other ranks.
    shuffle : bool
        Take the examples in random order.
    seed : int, optional
        Of that order; a different one each time by default.
    max_buf_len : int
        ``root`` copies and sends at most this many bytes of arrays at a time.
    force_equal_length : bool
        Give all ranks the same number of examples, some of them to two ranks if the number of
        ranks does not divide theirs. Otherwise the numbers may differ by one, and are 0 on some
        ranks if there are fewer examples than ranks.

    Returns
    -------
    chainer.datasets.SubDataset
        The examples of this rank.

    Raises
    ------
    TypeError
        On every rank, if the data set of ``root`` has no length, or what other ranks are to get
        of it cannot be pickled.
    ValueError
        On every rank, if ``root`` is not the same rank everywhere.

    Notes
    -----
    Of an array, a list, a ``TupleDataset`` or ``DictDataset`` of these, and a ``SubDataset`` of
    one of those, a rank is sent and holds its own examples only. Any other data set is sent to
    every rank as a whole, as it may compute its examples in any way: let it be one that reads
    its examples on demand.
    """
    where = "scatter_dataset"
    comm = _as_communicator(comm)
    check_root(comm, root, where)

    def plan() -> tuple[int, Indices | None, Columns | None]:
        if comm.rank != root:
            return 0, None, None
        n = _length(dataset, root)
        order = np.random.RandomState(seed).permutation(n) if shuffle else None
        return n, order, Columns.of(dataset) if comm.size > 1 else None

    n, order, columns = run_together(comm, where, plan)
    n, by_columns, force_equal_length = comm.bcast_obj(
        (n, columns is not None, force_equal_length), root=root
    )
    begin, end = part_bounds(n, comm.rank, comm.size, force_equal_length)
    if by_columns:
        parts = None
        if comm.rank == root:
            everything = np.arange(n) if order is None else order
            bounds = [part_bounds(n, i, comm.size, force_equal_length) for i in range(comm.size)]
            parts = [everything[first:last] for first, last in bounds]
        part = scatter_columns(columns, parts, comm, root, max_buf_len)
        return SubDataset(part, 0, end - begin)
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
        On ``root``; ignored elsewhere.
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
        On every rank, if the number of ``root`` is not one of examples, or ``root`` is not the
        same rank everywhere.
    """
    where = "scatter_index"
    check_root(comm, root, where)

    def check() -> int:
        n = operator.index(n_total_samples) if comm.rank == root else 0
        if n < 0:
            raise ValueError(f"the number of examples must not be negative, got {n}")
        return n

    n = run_together(comm, where, check)
    n, force_equal_length = comm.bcast_obj((n, force_equal_length), root=root)
    return part_bounds(n, comm.rank, comm.size, force_equal_length)


def get_n_iterations_for_one_epoch(
    dataset: Sized, local_batch_size: int, comm: CommunicatorBase
) -> int:
    """Return the number of batches in the part of rank 0, on every rank.

    .. deprecated:: 1.0
        Give the trainer a number of epochs, ``(n, 'epoch')``.

    Parameters
    ----------
    dataset : sized
        The part of this rank.
    local_batch_size : int
        Examples in a batch of one rank.
    comm : CommunicatorBase

    Raises
    ------
    TypeError, ValueError
        On every rank, if the arguments of rank 0 make no sense.
    """
    warnings.warn(
        "get_n_iterations_for_one_epoch is deprecated: give the trainer (1, 'epoch') instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: CommunicatorBase
) -> tuple[int, str]:
    """Return a trigger that fires every ``n_epochs`` epochs of rank 0, on every rank.

    .. deprecated:: 1.0
        Give the trainer ``(n_epochs, 'epoch')``.

    Parameters
    ----------
    n_epochs : int
    dataset : sized
        The part of this rank.
    local_batch_size : int
        Examples in a batch of one rank.
    comm : CommunicatorBase

    Returns
    -------
    (int, 'iteration')

    Raises
    ------
    TypeError, ValueError
        On every rank, if the arguments of rank 0 make no sense.
    """
    warnings.warn(
        f"get_epoch_trigger is deprecated: give the trainer ({n_epochs}, 'epoch') instead",
        DeprecationWarning,
        stacklevel=2,
    )
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


def _as_communicator(comm: Any) -> CommunicatorBase:
    is_of_mpi4py = type(comm).__module__.startswith("mpi4py")
    return NaiveCommunicator(comm) if is_of_mpi4py else comm


def _length(dataset: Any, root: int) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise TypeError(f"rank {root} must give a data set with a length: {error}") from None


def _n_iterations(dataset: Sized, local_batch_size: int, comm: CommunicatorBase) -> int:
    def count() -> int:
        if comm.rank != 0:
            return 0
        if local_batch_size < 1:
            raise ValueError(f"the batch size must be positive, got {local_batch_size}")
        return -(-len(dataset) // local_batch_size)

    n = run_together(comm, "get_n_iterations_for_one_epoch", count)
    return int(comm.bcast_obj(n, root=0))
