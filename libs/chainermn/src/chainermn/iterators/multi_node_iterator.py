"""Send the batches that one rank reads to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer.dataset import Iterator
from chainer.serializers import DictionarySerializer

from chainermn.agreement import check_root, run_on_root
from chainermn.arguments import check_communicator
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
        If ``communicator`` is not a communicator; on every rank, if ``rank_master`` passes no
        iterator.
    ValueError
        On every rank, if ``rank_master`` is not a rank, or differs between ranks.

    Examples
    --------
    >>> read = chainer.iterators.SerialIterator([5, 6, 7, 8], 2, shuffle=False)
    >>> iterator = chainermn.create_multi_node_iterator(read if comm.rank == 0 else None, comm)
    >>> next(iterator)
    [5, 6]
    """
    call = f"{_WHERE}(actual_iterator, communicator)"
    check_communicator(call, communicator, actual_iterator)
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
        self._is_known = False
        self._saved: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._settings: dict[str, Any] = self._share(self._describe)
        self._is_known = False  # the first batch may start a generator

    def __next__(self) -> list[Any]:
        batch = self._share(lambda: next(self._actual, None))
        if batch is None:
            raise StopIteration
        return batch

    next = __next__

    def reset(self) -> None:
        """Reset the master's iterator. Every rank must call it."""
        self._is_known = False
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
            self._is_known = False
        else:
            for key in list(self._saved):
                try:
                    self._saved[key] = serializer(key, self._saved[key])
                except KeyError:  # an older snapshot; the master sends its own
                    del self._saved[key]
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

    def _describe(self) -> dict[str, Any]:
        """Return settings of the master's iterator."""
        actual = self._actual
        if not hasattr(actual, "__next__"):
            raise TypeError(f"expected an iterator, got {type(actual)}")
        names = [name for name in ("batch_size", "repeat") if hasattr(actual, name)]
        return {name: getattr(actual, name) for name in names}

    def _own_state(self) -> dict[str, Any]:
        if not self._is_master:
            return dict(self._state)
        return {name: getattr(self._actual, name, start) for name, start in _START.items()}

    def _share(self, act: Callable[[], Any]) -> Any:
        """Return the result of ``act()`` on the master to every rank, and update the state.

        A single broadcast sends everything, because every iteration of training calls this.
        """

        def step() -> tuple[Any, dict[str, Any], dict[str, Any] | None]:
            result, state = act(), self._own_state()
            return result, state, self._news(state["is_new_epoch"])

        result, self._state, news = run_on_root(self.communicator, self.rank_master, _WHERE, step)
        if news is not None:
            self._saved = news
        return result

    def _news(self, is_new_epoch: bool) -> dict[str, Any] | None:
        """Return what the master saves besides the position, unless the other ranks know it."""
        if self._is_known and not is_new_epoch:
            return None
        self._is_known = True
        saved = DictionarySerializer()
        if hasattr(self._actual, "serialize"):
            self._actual.serialize(saved)
        return {key: value for key, value in saved.target.items() if key not in _START}
