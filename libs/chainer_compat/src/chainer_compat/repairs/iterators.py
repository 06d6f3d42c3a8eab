"""Make iterators repeatable: their orders, their snapshots and copies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chainer_compat import surgery

Indices: TypeAlias = NDArray[np.intp]
# A string, because loading numpy.random takes a while, and Chainer's import does without it.
Generator: TypeAlias = "np.random.RandomState | np.random.Generator"

_LENGTH = 8192  # of the state of any of NumPy's generators, as JSON


class State(NamedTuple):
    """Chainer's ``IteratorState``, and the generator that draws the orders that follow it.

    Nothing draws from this generator itself, only from copies of it.
    """

    current_position: int
    epoch: int
    is_new_epoch: bool
    order: Indices | None
    generator: Generator | None = None


class _Drawing:
    """Draws orders from copies of a generator; each draw starts where the one before ended."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, order: Indices, position: int) -> Indices:
        self.generator = copy.deepcopy(self.generator)
        return self.generator.permutation(len(order))


def draw_from_own_generator(module: ModuleType) -> None:
    """Let the thread that reads ahead draw from a generator of its own.

    It is a copy of the generator of Chainer's sampler, NumPy's global one by default, made after
    that has drawn the first order, when the iterator is made or reset.

    The copy travels with each batch, because the thread may already have drawn the next epoch. So
    a snapshot and a copy of the iterator continue after the batch that ``next`` returned last.
    Saving discards nothing that has been read ahead.
    """
    iterator = module.MultiprocessIterator
    advance = module._statemachine.iterator_statemachine

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

    @surgery.replaces(iterator, "_reset_state")
    def _reset_state(
        self: Any,
        current_position: int,
        epoch: int,
        is_new_epoch: bool,
        order: Indices | None,
        generator: Generator | None = None,
    ) -> None:
        if self._finalized:
            raise NotImplementedError("a finalized MultiprocessIterator cannot be reset")
        generator = generator or copy.deepcopy(_source(self.order_sampler))
        self._state = State(current_position, epoch, is_new_epoch, order, generator)
        self._comm.reset(self._state)

    @surgery.replaces(iterator, "serialize")
    def serialize(self: Any, serializer: Any) -> None:
        import chainer

        before = self._state
        generator = _serialize(serializer, before.generator, _source(self.order_sampler))
        is_saved = isinstance(serializer, chainer.Serializer)
        if before.order is not None and not is_saved:
            # It is loaded in place, and the thread may be reading it.
            self._state = before._replace(order=before.order.copy())
        chainer.iterators.SerialIterator.serialize(self, serializer)
        if is_saved:
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

        before, ahead = self._state, self._next
        generator = _serialize(serializer, before.generator, _source(self.order_sampler))
        save_or_load(self, serializer)
        if isinstance(serializer, chainer.Serializer):
            self._state, self._next = before, ahead
        else:
            self._state = self._state._replace(generator=generator)


def refuse_to_repeat_nothing(name: str) -> Callable[[ModuleType], None]:
    """Return a repair that lets an iterator raise ValueError, rather than ZeroDivisionError.

    A data set, or one that it wraps, can have an attribute ``why_not_repeated``, a text. If it is
    not None, the constructor raises the error, for example because others have no examples.
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
            reason = _why_not_repeated(dataset)
            if repeat and reason:
                raise ValueError(reason)

        def _epoch_size(self: Any) -> int:
            size: int = epoch_size(self)
            if size == 0:
                raise ValueError(f"the data set of this {name} has no example")
            return size

        iterator._epoch_size = property(_epoch_size)

    return repair


def _why_not_repeated(dataset: Any) -> str | None:
    from chainer.datasets import SubDataset, TransformDataset, TupleDataset

    inner: tuple[Any, ...] = ()
    if isinstance(dataset, (SubDataset, TransformDataset)):
        inner = (dataset._dataset,)
    elif isinstance(dataset, TupleDataset):
        inner = dataset._datasets
    reasons = (getattr(dataset, "why_not_repeated", None), *map(_why_not_repeated, inner))
    return next(filter(None, reasons), None)


def _source(sampler: Any) -> Generator | None:
    """Return NumPy's generator with which Chainer's own code draws orders; None otherwise."""
    from chainer.iterators import ShuffleOrderSampler

    call = ShuffleOrderSampler.__call__
    if not isinstance(sampler, ShuffleOrderSampler) or type(sampler).__call__ is not call:
        return None
    # For the module numpy.random, this is its global generator.
    generator = getattr(sampler._random.permutation, "__self__", None)
    return generator if type(generator) in (np.random.RandomState, np.random.Generator) else None


def _serialize(
    serializer: Any, generator: Generator | None, source: Generator | None
) -> Generator | None:
    """Save a generator, or load and return one like ``source``; None if the file has none.

    Its state is saved as JSON, with spaces at the end, as some serializers load only the shape
    that is there.
    """
    if source is None:
        return None
    state: Any = None
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif generator is not None:
        state = generator.get_state(legacy=False)
    text = json.dumps(state, default=lambda array: array.tolist()).ljust(_LENGTH)
    saved = np.frombuffer(bytearray(text, "ascii"), np.uint8)
    try:
        state = json.loads(serializer("generator", saved).tobytes(), object_hook=_within_bounds)
    except KeyError:
        return None
    if state is None:
        return None
    loaded = copy.deepcopy(source)
    try:
        if isinstance(loaded, np.random.Generator):
            loaded.bit_generator.state = state
        else:
            loaded.set_state(state)
    except ValueError:  # of another kind: the script has a new sampler
        return None
    return loaded


def _within_bounds(state: dict[str, Any]) -> dict[str, Any]:
    """Limit positions in the memory of generators, which NumPy does not check."""
    for name, length in (("pos", 624), ("buffer_pos", 4)):
        if name in state:
            state[name] = max(0, min(state[name], length))
    return state
