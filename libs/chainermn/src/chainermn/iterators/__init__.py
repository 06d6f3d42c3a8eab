"""Iterators that read with workers, copy batches in advance, or read the same on all ranks."""

from chainermn.iterators.multi_node_iterator import MultiNodeIterator, create_multi_node_iterator
from chainermn.iterators.multiprocess_iterator import MultiprocessIterator, start_forkserver
from chainermn.iterators.prefetch import PrefetchIterator, prefetch_to_device
from chainermn.iterators.synchronized_iterator import (
    SynchronizedIterator,
    create_synchronized_iterator,
)

__all__ = [
    "MultiNodeIterator",
    "MultiprocessIterator",
    "PrefetchIterator",
    "SynchronizedIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "prefetch_to_device",
    "start_forkserver",
]
