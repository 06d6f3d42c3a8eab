"""Read examples in the same order on all ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
from chainer.dataset import Iterator
from chainer.iterators import OrderSampler, ShuffleOrderSampler

from chainermn.agreement import check_equal, run_together
from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.datasets.distributed_sampler import DistributedOrderSampler

_WHERE = "create_synchronized_iterator"


def create_synchronized_iterator(
    actual_iterator: Iterator, communicator: CommunicatorBase
) -> SynchronizedIterator:
    """Make the iterators of all ranks read their examples in the same order. Collective.

    Use it in model parallelism, if each rank reads its own part of every example. All data sets
    must have the same length. After this call, the iterators no longer communicate.

    Parameters
    ----------
    actual_iterator : chainer.dataset.Iterator
        Iterator with the attributes ``dataset``, ``order_sampler`` and ``reset``, such as those
        of Chainer.
    communicator : CommunicatorBase
        Communicator of the ranks.

    Returns
    -------
    SynchronizedIterator
        Wrapper of ``actual_iterator``. Its random order depends on a seed that rank 0 draws from
        NumPy's global generator. An order sampler other than Chainer's ``ShuffleOrderSampler`` is
        replaced by a copy of rank 0's sampler. Without shuffling, the order does not change.

    Raises
    ------
    ValueError
        On every rank, if an iterator lacks one of these attributes, or if the data sets have
        different lengths.
    TypeError
        On every rank, if the order sampler of rank 0 must be copied but cannot be pickled.

    Examples
    --------
    >>> words = ["a", "b", "c", "d"] if comm.rank == 0 else ["A", "B", "C", "D"]
    >>> iterator = chainer.iterators.SerialIterator(words, 4)
    >>> iterator = chainermn.create_synchronized_iterator(iterator, comm)
    >>> batches = comm.allgather_obj("".join(next(iterator)))
    >>> batches[0].upper() == batches[1]
    True
    """
    call = f"{_WHERE}(actual_iterator, communicator)"
    check_communicator(call, communicator, actual_iterator)

    def check() -> tuple[int, OrderSampler | None]:
        for name in ("dataset", "order_sampler", "reset"):
            if not hasattr(actual_iterator, name):
                kind = type(actual_iterator)
                raise ValueError(
                    f"the iterator must have {name!r}, as those of Chainer have; got {kind}"
                )
        n, sampler = len(actual_iterator.dataset), actual_iterator.order_sampler
        if type(sampler) is ShuffleOrderSampler:
            return n, DistributedOrderSampler(n, 0, n, int(np.random.randint(2**31)))
        # Rank 0 needs a copy too: its own sampler may share a generator with other code.
        return n, copy.deepcopy(sampler) if communicator.rank == 0 else None

    length, sampler = run_together(communicator, _WHERE, check)
    check_equal(communicator, f"{length} examples", _WHERE)
    sampler = communicator.bcast_obj(sampler)
    actual_iterator.order_sampler = sampler
    if hasattr(actual_iterator, "_prefetch_loop"):  # of a MultiprocessIterator
        actual_iterator._prefetch_loop.order_sampler = sampler
    actual_iterator.reset()
    return SynchronizedIterator(actual_iterator, communicator)


class SynchronizedIterator(Iterator):
    """The iterator that `create_synchronized_iterator` returns.

    All other attributes are those of ``actual_iterator``.

    Examples
    --------
    >>> iterator = chainer.iterators.SerialIterator(data, batch_size=2)
    >>> iterator = chainermn.create_synchronized_iterator(iterator, comm)
    >>> iterator.batch_size, iterator.epoch
    (2, 0)
    """

    actual_iterator: Iterator
    communicator: CommunicatorBase

    def __init__(self, actual_iterator: Iterator, communicator: CommunicatorBase) -> None:
        self.__dict__.update(actual_iterator=actual_iterator, communicator=communicator)

    def __next__(self) -> list[Any]:
        return next(self.actual_iterator)

    next = __next__

    def finalize(self) -> None:
        """Stop the workers of the iterator, if it has any."""
        if "actual_iterator" in self.__dict__:
            self.actual_iterator.finalize()

    def serialize(self, serializer: Any) -> None:
        """Save or load the position and the seed, so that later epochs are the same, too."""
        sampler = self.actual_iterator.order_sampler
        if isinstance(sampler, DistributedOrderSampler):
            # The seed comes first, because an iterator with workers continues as soon as it is
            # loaded. A snapshot of a plain iterator has no seed.
            with contextlib.suppress(KeyError):
                sampler.seed = serializer("seed", sampler.seed)
        self.actual_iterator.serialize(serializer)

    def __getattr__(self, name: str) -> Any:
        if "actual_iterator" not in self.__dict__:  # while being copied
            raise AttributeError(name)
        return getattr(self.actual_iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.actual_iterator, name, value)
