"""Make iterators repeatable: their orders, their snapshots and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from chainer_compat import surgery

Indices: TypeAlias = NDArray[np.intp]

_N_KEYS = 624  # of the Mersenne Twister


class State(NamedTuple):
    """Chainer's ``IteratorState``, and the generator that draws the orders that follow it.

    Nothing draws from this generator itself, only from copies of it.
    """

    current_position: int
    epoch: int
    is_new_epoch: bool
    order: Indices | None
    generator: RandomState | None = None


class _Drawing:
    """Draws orders from copies of a generator; each draw starts where the one before ended."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, order: Indices, position: int) -> Indices:
        self.generator = copy.deepcopy(self.generator)
        return self.generator.permutation(len(order))


def always() -> bool:
    return True


def draw_from_own_generator(module: ModuleType) -> None:
    """Let the thread that reads ahead draw from a generator of its own.

    It is a copy of the generator of Chainer's sampler, NumPy's global one by default, as it is
    when the first batch is read. The copies of several iterators would then draw the same orders.
    So only the iterator that was made last does this; the others copy it when they are made.

    The copy travels with each batch, because the thread may already have drawn the next epoch. So
    a snapshot, a copy of the iterator and `reset` continue after the batch that ``next`` returned
    last. Saving discards nothing that has been read ahead.
    """
    iterator = module.MultiprocessIterator
    advance, next_ = module._statemachine.iterator_statemachine, iterator.__next__

    def iterator_statemachine(
        state: State, batch_size: int, repeat: bool, order_sampler: Any, dataset_len: int
    ) -> tuple[State, Any]:
        own = _Drawing(state.generator)
        sampler = own if state.generator else order_sampler
        after, indices = advance(state[:4], batch_size, repeat, sampler, dataset_len)
        return State._make([*after[:4], own.generator]), indices

    module._statemachine = surgery.view(  # type: ignore[attr-defined]
        module._statemachine, IteratorState=State, iterator_statemachine=iterator_statemachine
    )
    iterator._state, iterator._when_made = State(0, 0, False, None), None
    latest: RandomState | None = None

    @surgery.replaces(iterator, "__next__")
    def __next__(self: Any) -> Any:
        source = _source(self.order_sampler)
        if source and self._state.generator is None:
            is_latest = self._when_made is latest
            generator = copy.deepcopy(source if is_latest else self._when_made)
            self._reset_state(*self._state[:4], generator)
        return next_(self)

    iterator.next = __next__

    @surgery.replaces(iterator, "reset")
    def reset(self: Any) -> None:
        nonlocal latest
        source = _source(self.order_sampler)
        own = _Drawing(self._state.generator if source else None)
        sampler = own if own.generator else self.order_sampler
        order = None if sampler is None else sampler(np.arange(len(self.dataset)), 0)
        if source and not own.generator:
            self._when_made = latest = copy.deepcopy(source)
        self._reset_state(0, 0, False, order, own.generator)
        self._previous_epoch_detail = -1.0

    @surgery.replaces(iterator, "_reset_state")
    def _reset_state(self: Any, *state: Any) -> None:
        if self._finalized:
            raise NotImplementedError("a finalized MultiprocessIterator cannot be reset")
        self._state = State(*state)
        has_generator = self._state.generator or not _source(self.order_sampler)
        is_running = self._prefetch_loop is not None and self._prefetch_loop.thread is not None
        # Without one, a running thread would draw from the global one before `next` copies that.
        if has_generator or not is_running:
            self._comm.reset(self._state)

    @surgery.replaces(iterator, "serialize")
    def serialize(self: Any, serializer: Any) -> None:
        import chainer

        before, generator = self._state, None
        if _source(self.order_sampler):
            generator = _serialize(serializer, before.generator)
        if before.order is not None:  # it is loaded in place, and the thread may be reading it
            self._state = before._replace(order=before.order.copy())
        chainer.iterators.SerialIterator.serialize(self, serializer)
        if isinstance(serializer, chainer.Serializer):
            self._state = before
        else:
            self._reset_state(*self._state[:4], generator)

    @surgery.replaces(iterator, "__getstate__")
    def __getstate__(self: Any) -> dict[str, Any]:
        processes = ("_comm", "_prefetch_loop")
        return {name: value for name, value in vars(self).items() if name not in processes}

    @surgery.replaces(iterator, "__setstate__")
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        vars(self).update(state, order_sampler=None)  # so that no order is drawn
        self._initialize_loop()
        self.order_sampler = self._prefetch_loop.order_sampler = state["order_sampler"]
        self._reset_state(*state["_state"])
        self._previous_epoch_detail = state["_previous_epoch_detail"]

    del iterator.__copy__  # it draws an order, too


def keep_what_was_drawn(module: ModuleType) -> None:
    """Let a snapshot of MultithreadIterator hold how the next order was drawn.

    The iterator draws it, from NumPy's global generator, when it reads the next batch ahead.
    Without this, a snapshot discards that batch, and so does loading one. The order would then be
    drawn again, from a generator that has gone on.
    """
    iterator = module.MultithreadIterator
    invoke_prefetch, save_or_load = iterator._invoke_prefetch, iterator.serialize
    advance = module._statemachine.iterator_statemachine

    def iterator_statemachine(state: State, *settings: Any) -> tuple[State, Any]:
        after, indices = advance(state[:4], *settings)
        return State(*after[:4]), indices

    module._statemachine = surgery.view(  # type: ignore[attr-defined]
        module._statemachine, IteratorState=State, iterator_statemachine=iterator_statemachine
    )

    @surgery.replaces(iterator, "_invoke_prefetch")
    def _invoke_prefetch(self: Any) -> None:
        sampler, state = self.order_sampler, self._state
        redraw, generator = _Drawing(state.generator), state.generator

        def draw(order: Indices, position: int) -> Any:
            nonlocal generator
            if redraw.generator:
                return redraw(order, position)
            generator = generator or copy.deepcopy(_source(sampler))
            return sampler(order, position)

        self.order_sampler = draw
        try:
            invoke_prefetch(self)
        finally:
            self.order_sampler = sampler
        self._state = state._replace(generator=generator)

    @surgery.replaces(iterator, "serialize")
    def serialize(self: Any, serializer: Any) -> None:
        import chainer

        before, ahead, generator = self._state, self._next, None
        if _source(self.order_sampler):
            generator = _serialize(serializer, before.generator)
        save_or_load(self, serializer)
        if isinstance(serializer, chainer.Serializer):
            self._state, self._next = before, ahead
        else:
            self._state = self._state._replace(generator=generator)


def refuse_to_repeat_nothing(name: str) -> Callable[[ModuleType], None]:
    """Return a repair that lets an iterator raise ValueError, rather than ZeroDivisionError.

    A data set can have an attribute ``why_not_repeated``, a text. If it is not None, the
    constructor raises the error, for example because others have no examples.
    """

    def repair(module: ModuleType) -> None:
        iterator = getattr(module, name)
        init, epoch_size = iterator.__init__, iterator._epoch_size.fget

        @surgery.replaces(iterator, "__init__")
        def __init__(
            self: Any,
            dataset: Any,
            batch_size: int,
            repeat: bool = True,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            init(self, dataset, batch_size, repeat, *args, **kwargs)
            reason = getattr(dataset, "why_not_repeated", None)
            if repeat and reason:
                raise ValueError(reason)

        def _epoch_size(self: Any) -> int:
            size: int = epoch_size(self)
            if size == 0:
                raise ValueError(f"the data set of this {name} has no example")
            return size

        iterator._epoch_size = property(_epoch_size)

    return repair


def _source(sampler: Any) -> RandomState | None:
    """Return the generator of a sampler of Chainer's; None for other samplers."""
    from chainer.iterators import ShuffleOrderSampler

    generator = sampler._random if type(sampler) is ShuffleOrderSampler else None
    return generator if isinstance(generator, RandomState) else None


def _serialize(serializer: Any, generator: RandomState | None) -> RandomState | None:
    """Save a generator, or load and return one; None if the file has none.

    It is saved as 625 integers, all 0 for None and for generators other than NumPy's usual one.
    """
    numbers = np.zeros(_N_KEYS + 1, np.uint32)
    if generator is not None:
        state = generator.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            numbers[:_N_KEYS], numbers[_N_KEYS] = state["state"]["key"], state["state"]["pos"]
    try:
        numbers = serializer("generator", numbers)
    except KeyError:
        return None
    if not numbers.any():
        return None
    loaded = RandomState()
    # NumPy does not check the position.
    position = min(int(numbers[_N_KEYS]), _N_KEYS)
    loaded.set_state(("MT19937", numbers[:_N_KEYS], position, 0, 0.0))
    return loaded
