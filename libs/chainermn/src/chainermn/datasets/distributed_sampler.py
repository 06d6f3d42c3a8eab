"""Divide a data set among the ranks, in a new way for each epoch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sized

import numpy as np
from chainer.iterators import OrderSampler

from chainermn.agreement import check_equal, run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets.scatter import part_bounds, ranks_without_examples
from chainermn.datasets.shards import Indices

# A permutation of 1.3 million examples takes 15 ms.
_SEARCHED_EPOCHS = 1000


def create_distributed_sampler(
    dataset: Sized | int,
    comm: CommunicatorBase,
    *,
    shuffle: bool = True,
    seed: int | None = None,
    force_equal_length: bool = True,
) -> DistributedOrderSampler:
    """Divide a data set that every rank can read, in a new way for each epoch.

    Give the sampler to one of Chainer's iterators, together with the whole data set. The iterator
    then reads only the shard of its rank. Examples are shuffled across all ranks, while
    `scatter_dataset` fixes the shard of each rank once.

    Parameters
    ----------
    dataset : sized or int
        Whole data set, or its number of examples; the same length on every rank.
    comm : CommunicatorBase
        Communicator of the ranks that share the examples.
    shuffle : bool
        Whether to shuffle before each epoch. Otherwise all epochs are the same.
    seed : int, optional
        Seed of the shuffling, from 0 to 2**32 - 1. Every rank uses that of rank 0. By default,
        rank 0 draws one from NumPy's global generator.
    force_equal_length : bool
        Whether all ranks get the same number of examples, see `scatter_dataset`. No iterator can
        use a sampler that leaves a rank without examples: it raises ValueError on every rank.

    Returns
    -------
    DistributedOrderSampler
        Order sampler for ``chainer.iterators``.

    Raises
    ------
    TypeError, ValueError
        On every rank, if an argument is invalid or the lengths differ.

    Examples
    --------
    >>> sampler = chainermn.create_distributed_sampler(data, comm, seed=1)
    >>> iterator = chainer.iterators.SerialIterator(data, batch_size=2, order_sampler=sampler)
    >>> len(next(iterator)), iterator.epoch_detail
    (2, 0.5)
    """
    where = "create_distributed_sampler"

    def check() -> tuple[int, int]:
        n = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        number = int(np.random.randint(2**31)) if seed is None else operator.index(seed)
        if not 0 <= number < 2**32:
            raise ValueError(f"the seed must be from 0 to 2**32 - 1, got {number}")
        return n, number

    n, own_seed = run_together(comm, where, check)
    hint = "if only one rank has the data set, use scatter_dataset"
    check_equal(comm, f"a data set of {n} examples", f"{where} ({hint})")
    bounds = part_bounds(n, comm.rank, comm.size, force_equal_length)
    sampler = DistributedOrderSampler(n, *bounds, comm.bcast_obj(own_seed), shuffle)
    sampler.lacking = ranks_without_examples(n, comm.size, force_equal_length)
    return sampler


class DistributedOrderSampler(OrderSampler):
    """Order sampler that `create_distributed_sampler` returns.

    The order of an epoch depends only on the seed, the epoch and the number of ranks. Of all
    ``n`` shuffled examples, this rank reads those at ``range(begin, end)``.

    Attributes
    ----------
    epoch : int
        Epoch whose order the next call returns, from 0.
    lacking : str, optional
        Ranks that have no example; iterators then raise ValueError.

    Examples
    --------
    The ranks share the eight examples, in a different way in each epoch:

    >>> sampler = chainermn.create_distributed_sampler(8, comm, seed=1)
    >>> sampler.order(epoch=0)
    array([6, 3, 7, 1])
    array([4, 0, 2, 5])
    >>> sampler.order(epoch=1)
    array([7, 2, 0, 6])
    array([3, 1, 4, 5])
    """

    lacking: str | None = None

    def __init__(self, n: int, begin: int, end: int, seed: int, shuffle: bool = True) -> None:
        self.n = n
        self.seed = seed
        self.epoch = 0
        self._part = slice(begin, end)
        self._shuffle = shuffle
        self._latest: Indices | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose order the next call returns.

        You need this only to read epochs in an order other than 0, 1, 2, ... An iterator that
        resumes from a snapshot continues by itself with the next epoch.
        """
        self.epoch = epoch

    def order(self, epoch: int) -> Indices:
        """Return the indices of this rank's examples, in the order of an epoch."""
        if not self._shuffle:
            return np.arange(self.n)[self._part]
        # RandomState gives the same numbers in every release of NumPy.
        generator = np.random.RandomState([self.seed, epoch])
        return generator.permutation(self.n)[self._part].copy()

    def __call__(self, current_order: Indices, current_position: int) -> Indices:
        """Return the next order; Chainer's iterators call this before each epoch.

        ``current_order`` is the order that the previous call returned or that a snapshot held,
        or ``arange(n)`` at the start. Raises ValueError if the iterator's data set has another
        length, and on every rank if one has no example.
        """
        if self.lacking:
            raise ValueError(self.lacking)
        length = self._part.stop - self._part.start
        if len(current_order) not in (self.n, length):
            raise ValueError(
                f"the sampler divides a data set of {self.n} examples, {length} of them for this "
                f"rank, but the iterator has {len(current_order)}"
            )
        is_start = np.array_equal(current_order, np.arange(len(current_order)))
        is_known = self._latest is None or np.array_equal(current_order, self._latest)
        if not is_start and not is_known:
            self._recognize(current_order)
        order = self.order(self.epoch)
        self._latest = order.copy()  # iterators load snapshots into the array that they hold
        self.epoch += 1
        return order

    def _recognize(self, current_order: Indices) -> None:
        """Continue after the epoch whose order the iterator has loaded from a snapshot."""
        for epoch in range(_SEARCHED_EPOCHS):
            if np.array_equal(self.order(epoch), current_order):
                self.epoch = epoch + 1
                return
        warnings.warn(
            f"the iterator's order is none of the first {_SEARCHED_EPOCHS} epochs with the seed "
            f"{self.seed}: its snapshot was written with another seed, number of ranks or order "
            f"sampler. Continuing with epoch {self.epoch}; choose another with set_epoch",
            stacklevel=3,
        )
