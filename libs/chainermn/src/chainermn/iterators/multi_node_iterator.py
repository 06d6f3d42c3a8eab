"""Send the batches that one rank reads to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer.dataset import Iterator
from chainer.iterators import MultithreadIterator

from chainermn.agreement import check_root, run_on_root
from chainermn.communicators.communicator_base import CommunicatorBase

_WHERE = "create_multi_node_iterator"

# Attributes that Chainer's updaters, triggers and reports read, before the first batch.
_START: dict[str, Any] = {
    "epoch": 0,
    "is_new_epoch": False,
    "current_position": 0,
    "epoch_detail": 0.0,
    "previous_epoch_detail": None,
}


def create_multi_node_iterator(
    actual_iterator: Iterator | None, communicator: CommunicatorBase, rank_master: int = 0
) -> MultiNodeIterator:
    """Create an iterator that yields the batches of one rank on all ranks.

    Use it in model parallelism, if several ranks need the same input. Every rank must create the
    iterator, and take the same number of batches from it.

    Parameters
    ----------
    actual_iterator : chainer.dataset.Iterator
        Iterator over examples that can be pickled; only that of ``rank_master`` is used.
    communicator : CommunicatorBase
        Communicator of the ranks.
    rank_master : int
        Rank that reads the data.

    Returns
    -------
    MultiNodeIterator
        Iterator for this rank.

    Raises
    ------
    TypeError
        On every rank, if ``rank_master`` passes no iterator.
    ValueError
        On every rank, if ``rank_master`` is not a rank, or differs between ranks.

    Examples
    --------
    >>> read = chainer.iterators.SerialIterator([5, 6, 7, 8], 2, shuffle=False)
    >>> iterator = chainermn.create_multi_node_iterator(read if comm.rank == 0 else None, comm)
    >>> next(iterator)
    [5, 6]
    """
    check_root(communicator, rank_master, _WHERE)
    return MultiNodeIterator(actual_iterator, communicator, rank_master)


class MultiNodeIterator(Iterator):
    """The iterator that `create_multi_node_iterator` returns.

    ``next`` and ``reset`` are collective; ``serialize`` is not. Every rank saves the state of the
    master's iterator. So all ranks can load the snapshot of any rank, and continue with the same
    batch. A plain iterator can load it too.

    Attributes
    ----------
    epoch, is_new_epoch, current_position, epoch_detail, previous_epoch_detail
        State of the master's iterator, on every rank.
    batch_size, repeat
        Settings of the master's iterator, on every rank, if it has them. The master itself also
        has all other attributes of its iterator.

    Examples
    --------
    >>> iterator = chainer.iterators.SerialIterator(data, batch_size=4)
    >>> iterator = chainermn.create_multi_node_iterator(iterator, comm)
    >>> batches = [next(iterator) for _ in range(2)]
    >>> iterator.epoch, iterator.is_new_epoch, iterator.batch_size
    (1, True, 4)
    """

    def __init__(
        self, actual_iterator: Iterator | None, communicator: CommunicatorBase, rank_master: int
    ) -> None:
        self.communicator = communicator
        self.rank_master = rank_master
        self._is_master = communicator.rank == rank_master
        self._actual: Any = actual_iterator if self._is_master else None
        self._order_is_known = False
        self._order: Any = None
        self._state: dict[str, Any] = {}
        self._settings: dict[str, Any]
        self._settings, self._order_key = self._share(self._describe)

    def __next__(self) -> list[Any]:
        batch = self._share(lambda: next(self._actual, None))
        if batch is None:
            raise StopIteration
        return batch

    next = __next__

    def reset(self) -> None:
        """Reset the master's iterator. Every rank must call it."""
        self._order_is_known = False
        self._share(lambda: self._actual.reset())

    def finalize(self) -> None:
        """Stop the workers of the master's iterator, if it has any."""
        actual: Any = self.__dict__.get("_actual")
        if hasattr(actual, "finalize"):
            actual.finalize()

    def serialize(self, serializer: Any) -> None:
        """Save or load the position in the data and the order of the examples in this epoch."""
        if self._is_master:
            self._actual.serialize(serializer)
            self._order_is_known = False
        elif self._order is not None:
            try:
                self._order = serializer(self._order_key, self._order)
            except KeyError:  # the snapshot has no order; the master sends its own
                self._order = None
        state = self._own_state()
        # Chainer's serializers cannot load None into a number.
        if state["previous_epoch_detail"] is None:
            state["previous_epoch_detail"] = -1.0
        for name in _START if not self._is_master else ("epoch_detail",):
            state[name] = serializer(name, state[name])
        if state["previous_epoch_detail"] < 0:
            state["previous_epoch_detail"] = None
        self._state = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._is_master:
            return getattr(self._actual, name)
        if name in _START:
            return self._state[name]
        if name in self._settings:
            return self._settings[name]
        raise AttributeError(
            f"{name!r}: rank {self.communicator.rank} has only the batches and the position of "
            f"the iterator of rank {self.rank_master}"
        )

    def _describe(self) -> tuple[dict[str, Any], str]:
        """Return settings of the master's iterator, and the key under which it saves its order."""
        actual = self._actual
        if not hasattr(actual, "__next__"):
            raise TypeError(f"expected an iterator, got {type(actual)}")
        names = [name for name in ("batch_size", "repeat") if hasattr(actual, name)]
        # MultithreadIterator alone saves it under another name.
        order_key = "_order" if isinstance(actual, MultithreadIterator) else "order"
        return {name: getattr(actual, name) for name in names}, order_key

    def _own_state(self) -> dict[str, Any]:
        if not self._is_master:
            return dict(self._state)
        return {name: getattr(self._actual, name, start) for name, start in _START.items()}

    def _share(self, act: Callable[[], Any]) -> Any:
        """Return the result of ``act()`` on the master to every rank, and update the state.

        A single broadcast sends everything, because every iteration of training calls this.
        """

        def step() -> tuple[Any, dict[str, Any], tuple[Any] | None]:
            result, state = act(), self._own_state()
            return result, state, self._new_order(state["is_new_epoch"])

        result, self._state, new_order = run_on_root(
            self.communicator, self.rank_master, _WHERE, step
        )
        if new_order is not None:
            (self._order,) = new_order
        return result

    def _new_order(self, is_new_epoch: bool) -> tuple[Any] | None:
        """Return the order of the examples, on the master, unless the other ranks know it."""
        if self._order_is_known and not is_new_epoch:
            return None
        self._order_is_known = True
        return (getattr(getattr(self._actual, "_state", None), "order", None),)
