"""Scatter a data set that one rank has."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn.agreement import check_root, run_on_root
from chainermn.arguments import check_communicator
from chainermn.communicators import CommunicatorBase, create_communicator
from chainermn.datasets.shards import Columns, Indices, scatter_columns
from chainermn.resuming import unseeded_calls

if TYPE_CHECKING:
    from mpi4py import MPI


class DataSizeError(RuntimeError):
    """An error that is never raised, because data sets may now have any size.

    It is kept for scripts that catch it.

    Examples
    --------
    >>> try:
    ...     part = chainermn.scatter_dataset(data, comm)
    ... except chainermn.DataSizeError:
    ...     raise
    """


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
    """Divide the data set of one rank among all ranks. Collective.

    Parameters
    ----------
    dataset : sequence
        Data set with ``len`` and ``[]`` that can be pickled; only that of the root is used.
    comm : CommunicatorBase or mpi4py.MPI.Intracomm
        Communicator of the ranks that share the examples. Scripts written for ChainerMN 1.0 may
        pass one of mpi4py.
    root : int
        Rank that has the data set. The arguments below count only on this rank.
    shuffle : bool
        Whether to shuffle the examples before they are divided.
    seed : int, optional
        Seed of the shuffling. By default, the order is different each time.
    max_buf_len : int
        Largest number of bytes of arrays that the root copies and sends at a time.
    force_equal_length : bool
        Whether all ranks get the same number of examples. Some examples then go to two ranks if
        the number of ranks does not divide the number of examples. Otherwise, ranks may differ
        by one example. With fewer examples than ranks, some ranks then get none: an iterator with
        ``repeat=True`` raises ValueError on every rank, and an evaluator works.

    Returns
    -------
    chainer.datasets.SubDataset
        The shard of this rank.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator; on every rank, if the data set of the root has no
        length, if its examples cannot be pickled, or if it is a DataFrame of pandas, or a Series
        whose index is not 0, 1, 2, ...
    ValueError
        On every rank, if ``root`` is not a rank, or differs between ranks.

    Notes
    -----
    Each rank receives and holds only its own examples if the data set is an array, a list, a
    ``TupleDataset`` or ``DictDataset`` of these, or a ``SubDataset`` of one of those. Any other
    data set goes to every rank as a whole, because it may compute its examples in any way. Such a
    data set should read its examples on demand.

    Examples
    --------
    >>> part = chainermn.scatter_dataset([10, 11, 12, 13] if comm.rank == 0 else None, comm)
    >>> part[:]
    [10, 11]
    [12, 13]
    """
    where = "scatter_dataset"
    if not hasattr(comm, "Get_group"):  # of mpi4py, in scripts for ChainerMN 1.0
        check_communicator("scatter_dataset(dataset, comm)", comm, dataset)
    elif not isinstance(comm, CommunicatorBase):
        comm = create_communicator("naive", comm)
    check_root(comm, root, where)
    if shuffle and seed is None:
        unseeded_calls.add("scatter_dataset(shuffle=True)")

    columns: Columns | None = None
    order: Indices | None = None

    def plan() -> tuple[int, bool, tuple[Any, int] | None]:
        nonlocal columns, order
        try:
            n = len(dataset)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"rank {root} must pass a data set with a length: {error}") from None
        order = np.random.RandomState(seed).permutation(n) if shuffle else None
        columns = Columns.of(SubDataset(dataset, 0, n, order))
        if columns is None or comm.size == 1:
            return n, force_equal_length, None
        rounds = columns.round_length(max_buf_len, comm.size)
        return n, force_equal_length, (columns.assemble, rounds)

    n, force_equal_length, by_columns = run_on_root(comm, root, where, plan)
    bounds = [part_bounds(n, rank, comm.size, force_equal_length) for rank in range(comm.size)]
    begin, end = bounds[comm.rank]
    if by_columns:
        assemble, round_length = by_columns
        own = scatter_columns(columns, bounds, round_length, comm, root)
        part = SubDataset(assemble(own), 0, end - begin)
    else:
        if comm.size > 1:
            dataset, order = comm.bcast_obj((dataset, order), max_buf_len=max_buf_len, root=root)
        part = SubDataset(dataset, begin, end, order)
    # chainer_compat lets iterators of all ranks raise this.
    part.why_not_repeated = ranks_without_examples(n, comm.size, force_equal_length)
    return part


def scatter_index(
    n_total_samples: int, comm: CommunicatorBase, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Divide the indices of a data set among all ranks. Collective.

    Parameters
    ----------
    n_total_samples : int
        Number of examples of the data set; only that of the root is used.
    comm : CommunicatorBase
        Communicator of the ranks that share the examples.
    root : int
        Rank that knows the number of examples.
    force_equal_length : bool
        Whether all ranks get the same number of indices, see `scatter_dataset`.

    Returns
    -------
    (begin, end) : tuple of int
        Bounds of this rank's part, ``range(begin, end)``.

    Raises
    ------
    TypeError, ValueError
        On every rank, if ``n_total_samples`` of the root is not an integer or is negative, or if
        ``root`` is not a rank or differs between ranks.

    Examples
    --------
    >>> chainermn.scatter_index(100, comm)
    (0, 50)
    (50, 100)
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
    """Return the number of batches of an epoch on rank 0. Collective.

    .. deprecated:: 1.0
        Give the trainer a number of epochs instead: ``(n, 'epoch')``.

    Parameters
    ----------
    dataset : sized
        Shard of this rank; only that of rank 0 is used.
    local_batch_size : int
        Number of examples per rank in a batch.
    comm : CommunicatorBase
        Communicator of all ranks.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the arguments of rank 0 are invalid.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")  # of the deprecation
    >>> chainermn.get_n_iterations_for_one_epoch(range(100), 32, comm)
    4
    """
    _warn("get_n_iterations_for_one_epoch", 1)
    return _n_iterations(dataset, local_batch_size, comm)


def get_epoch_trigger(
    n_epochs: int, dataset: Sized, local_batch_size: int, comm: CommunicatorBase
) -> tuple[int, str]:
    """Return a trigger in iterations that fires every ``n_epochs`` epochs of rank 0. Collective.

    .. deprecated:: 1.0
        Give the trainer ``(n_epochs, 'epoch')`` instead.

    Parameters
    ----------
    n_epochs : int
        Number of epochs between two calls.
    dataset, local_batch_size, comm
        The arguments of `get_n_iterations_for_one_epoch`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the arguments of rank 0 are invalid.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")  # of the deprecation
    >>> chainermn.get_epoch_trigger(2, range(100), 32, comm)
    (8, 'iteration')
    """
    _warn("get_epoch_trigger", n_epochs)
    return n_epochs * _n_iterations(dataset, local_batch_size, comm), "iteration"


def part_bounds(n: int, rank: int, size: int, force_equal_length: bool) -> tuple[int, int]:
    """Return the bounds of the part of ``rank`` in ``range(n)``."""
    if force_equal_length:
        begin = n * rank // size
        return begin, begin + -(-n // size)
    # The first ranks have one more, as in the original ChainerMN.
    each, remainder = divmod(n, size)
    begin = rank * each + min(rank, remainder)
    return begin, begin + each + (rank < remainder)


def ranks_without_examples(n: int, size: int, force_equal_length: bool) -> str | None:
    """Describe which ranks have no example, and what to do; None if all have some."""
    if n >= size or (n and force_equal_length):
        return None
    who = f"rank {n} has" if n == size - 1 else f"ranks {n} to {size - 1} have"
    way = "pass force_equal_length=True, or start fewer ranks" if n else "the data set is empty"
    return f"{who} no example: {n} example{'s' * (n != 1)}, {size} ranks; {way}"


def _warn(name: str, n_epochs: int) -> None:
    message = f"{name} is deprecated: give the trainer ({n_epochs}, 'epoch') instead"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _n_iterations(dataset: Sized, local_batch_size: int, comm: CommunicatorBase) -> int:
    def count() -> int:
        if local_batch_size < 1:
            raise ValueError(f"the batch size must be positive, got {local_batch_size}")
        return -(-len(dataset) // local_batch_size)

    return run_on_root(comm, 0, "get_n_iterations_for_one_epoch", count)
