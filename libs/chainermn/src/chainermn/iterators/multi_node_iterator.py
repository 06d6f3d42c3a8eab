"""Batches that one rank reads and all ranks get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer.dataset import Iterator
from chainer.iterators import MultithreadIterator

from chainermn.agreement import check_root, run_together

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase

_WHERE = "create_multi_node_iterator"

# What Chainer's updaters, triggers and reports read from an iterator, before its first batch.
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
    """Make all ranks iterate over the batches of one rank.

    For models divided among ranks, of which several need the same input. Every rank must create
    it, and step it as often as the others.

    Parameters
    ----------
    actual_iterator : chainer.dataset.Iterator
        On ``rank_master``; ignored elsewhere, so may be None. Its examples can be pickled.
    communicator : CommunicatorBase
    rank_master : int

    Returns
    -------
    MultiNodeIterator

    Raises
    ------
    TypeError
        On every rank, if ``rank_master`` gives no iterator.
    ValueError
        On every rank, if ``rank_master`` is not the same rank everywhere.
    """
    check_root(communicator, rank_master, _WHERE)

    def check() -> None:
        if communicator.rank == rank_master and not hasattr(actual_iterator, "__next__"):
            raise TypeError(f"expected an iterator, got {type(actual_iterator)}")

    run_together(communicator, _WHERE, check)
    return MultiNodeIterator(actual_iterator, communicator, rank_master)


class MultiNodeIterator(Iterator):
    """Yields the batches of the master's iterator; see `create_multi_node_iterator`.

    ``next`` and ``reset`` are collective; ``serialize`` is not. Every rank saves what the
    iterator of the master would, so the snapshot of any rank can be loaded by all ranks, which
    then continue with the same batch, and by a plain iterator.

    Attributes
    ----------
    epoch, is_new_epoch, current_position, epoch_detail, previous_epoch_detail
        Those of the master's iterator, on every rank. On the master all other attributes are
        those of its iterator.
    batch_size, repeat
        Those of the master's iterator, on every rank, if it has them.
    """

    def __init__(
        self, actual_iterator: Iterator | None, communicator: CommunicatorBase, rank_master: int
    ) -> None:
        self.communicator = communicator
        self.rank_master = rank_master
        self._is_master = communicator.rank == rank_master
        self._actual: Any = actual_iterator if self._is_master else None
        settings = {
            name: getattr(self._actual, name)
            for name in ("batch_size", "repeat")
            if hasattr(self._actual, name)
        }
        # The one iterator of Chainer's that saves its order under another name.
        order_key = "_order" if isinstance(self._actual, MultithreadIterator) else "order"
        self._settings: dict[str, Any]
        self._settings, self._order_key = communicator.bcast_obj(
            (settings, order_key), root=rank_master
        )
        self._order_is_known = False
        self._order: Any = None
        self._state: dict[str, Any] = {}
        self._share(lambda: None)

    def __next__(self) -> list[Any]:
        batch = self._share(lambda: next(self._actual, None))
        if batch is None:
            raise StopIteration
        return batch

    next = __next__

    def reset(self) -> None:
        """Go back to the start, as the master's iterator does. Every rank must call it."""
        self._order_is_known = False
        self._share(lambda: self._actual.reset())

    def finalize(self) -> None:
        """End the workers of the master's iterator, if there are any."""
        actual: Any = self.__dict__.get("_actual")
        if hasattr(actual, "finalize"):
            actual.finalize()

    def serialize(self, serializer: Any) -> None:
        """Save or load the position in the data, and the order of the examples in this epoch."""
        if self._is_master:
            self._actual.serialize(serializer)
            self._order_is_known = False
        elif self._order is not None:
            try:
                self._order = serializer(self._order_key, self._order)
            except KeyError:  # a snapshot that has none; the master sends its own
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

    def _own_state(self) -> dict[str, Any]:
        if not self._is_master:
            return dict(self._state)
        return {name: getattr(self._actual, name, start) for name, start in _START.items()}

    def _share(self, act: Callable[[], Any]) -> Any:
        """Return what ``act`` returns on the master, on every rank, and note where it then is."""
        message: tuple[Any, dict[str, Any], Any, str | None] | None = None
        if self._is_master:
            try:
                result, failure = act(), None
            except Exception as error:
                raised, result, failure = error, None, f"{type(error).__name__}: {error}"
            state = self._own_state()
            message = result, state, self._new_order(state["is_new_epoch"]), failure
        result, self._state, new_order, failure = self.communicator.bcast_obj(
            message, root=self.rank_master
        )
        if new_order is not None:
            (self._order,) = new_order
        if failure is not None:
            if self._is_master:
                raise raised
            raise RuntimeError(f"the iterator of rank {self.rank_master} failed: {failure}")
        return result

    def _new_order(self, is_new_epoch: bool) -> tuple[Any] | None:
        """Return the order of the examples if the other ranks do not know it; on the master."""
        if self._order_is_known and not is_new_epoch:
            return None
        self._order_is_known = True
        return (getattr(getattr(self._actual, "_state", None), "order", None),)
