"""Iterators that read with workers, or yield the same batches or order on several ranks."""

from chainermn.iterators.multi_node_iterator import MultiNodeIterator, create_multi_node_iterator
from chainermn.iterators.multiprocess_iterator import MultiprocessIterator, start_forkserver
from chainermn.iterators.synchronized_iterator import (
    SynchronizedIterator,
    create_synchronized_iterator,
)

__all__ = [
    "MultiNodeIterator",
    "MultiprocessIterator",
    "SynchronizedIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "start_forkserver",
]
