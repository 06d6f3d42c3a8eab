"""Divide a data set among the ranks anew for each epoch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sized

import numpy as np
from chainer.iterators import OrderSampler

from chainermn.agreement import check_equal, run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets.scatter import part_bounds
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
    """Divide a data set that every rank can read, anew for each epoch.

    Give the sampler to an iterator of Chainer's, which then visits the part of this rank:
    ``SerialIterator(dataset, batch_size, order_sampler=sampler)``. Examples are shuffled across
    all ranks; `scatter_dataset` only allows shuffling within the part of each rank.

    Parameters
    ----------
    dataset : sized or int
        The whole data set, or the number of its examples; of the same length on every rank.
    comm : CommunicatorBase
    shuffle : bool
        Shuffle anew before each epoch. Otherwise all epochs are the same.
    seed : int, optional
        Seed of the shuffling, from 0 to 2**32 - 1. Every rank uses the seed of rank 0, which by
        default draws one from NumPy's global generator.
    force_equal_length : bool
        As for `scatter_dataset`.

    Returns
    -------
    DistributedOrderSampler

    Raises
    ------
    TypeError, ValueError
        On every rank, if an argument is invalid or the lengths differ.
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
    return DistributedOrderSampler(n, *bounds, comm.bcast_obj(own_seed), shuffle)


class DistributedOrderSampler(OrderSampler):
    """Shuffles the examples of one rank; see `create_distributed_sampler`.

    The order of an epoch depends only on the seed, the epoch and the number of ranks. This rank
    visits ``range(begin, end)`` of the ``n`` shuffled examples of all ranks.

    Attributes
    ----------
    epoch : int
        The epoch whose order the next call returns.
    """

    def __init__(self, n: int, begin: int, end: int, seed: int, shuffle: bool = True) -> None:
        self.n = n
        self.seed = seed
        self.epoch = 0
        self._part = slice(begin, end)
        self._shuffle = shuffle
        self._latest: Indices | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next call return the order of ``epoch``, counted from 0.

        Needed only to visit epochs in another order than 0, 1, 2, ...: an iterator that resumes
        from a snapshot continues with the epoch after that of the snapshot.
        """
        self.epoch = epoch

    def order(self, epoch: int) -> Indices:
        """Return the indices of this rank's examples in the order of an epoch."""
        if not self._shuffle:
            return np.arange(self.n)[self._part]
        # RandomState's numbers are the same in every release of NumPy.
        generator = np.random.RandomState([self.seed, epoch])
        return generator.permutation(self.n)[self._part].copy()

    def __call__(self, current_order: Indices, current_position: int) -> Indices:
        """Return the next order, as Chainer's iterators ask for it.

        ``current_order`` is what the previous call returned, or what the iterator read from a
        snapshot; ``arange(n)`` at the start. Raises ValueError if the iterator's data set has
        another length.
        """
        length = self._part.stop - self._part.start
        if len(current_order) not in (self.n, length):
            raise ValueError(
                f"the sampler divides a data set of {self.n} examples, {length} of them for this "
                f"rank, but the iterator has {len(current_order)}"
            )
        is_start = np.array_equal(current_order, np.arange(len(current_order)))
        is_known = self._latest is None or np.array_equal(current_order, self._latest)
        if not is_start and not is_known:
            self._recognise(current_order)
        order = self.order(self.epoch)
        self._latest = order.copy()  # iterators load snapshots into the array they were given
        self.epoch += 1
        return order

    def _recognise(self, current_order: Indices) -> None:
        """Continue after the epoch whose order the iterator has read from a snapshot."""
        for epoch in range(_SEARCHED_EPOCHS):
            if np.array_equal(self.order(epoch), current_order):
                self.epoch = epoch + 1
                return
        warnings.warn(
            f"the iterator's order is none of the first {_SEARCHED_EPOCHS} epochs with the seed "
            f"{self.seed}: its snapshot was written with another seed, number of ranks or order "
            f"sampler. Continuing with epoch {self.epoch}; set_epoch sets another",
            stacklevel=3,
        )
