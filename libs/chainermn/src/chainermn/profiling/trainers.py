"""Make spans of a trainer's iterations, batches and extensions."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer.dataset.convert import _call_converter

from chainermn import spans
from chainermn.profiling.timeline.iterations import EXTENSION

_instrumented: weakref.WeakKeyDictionary[Any, TrainerSpans] = weakref.WeakKeyDictionary()
_iterators: set[type] = set()


def instrument(trainer: chainer.training.Trainer) -> TrainerSpans:
    """Make spans of a trainer's work from its next iteration on, if anything listens to spans.

    Call this before the training starts, or in an extension's ``initialize``.
    """
    if trainer not in _instrumented:
        _instrumented[trainer] = TrainerSpans(trainer)
    return _instrumented[trainer]


class TrainerSpans:
    """Makes spans of a trainer's work.

    An iteration begins with the update and ends when the last extension has returned.
    """

    def __init__(self, trainer: chainer.training.Trainer) -> None:
        updater = self._updater = trainer.updater
        self._update: Callable[[], None] = updater.update
        updater.update = self._timed_update
        for iterator in vars(updater).get("_iterators", {}).values():
            _time_batches_of(type(iterator))
        if hasattr(updater, "converter"):
            updater.converter = _timed_converter(updater.converter)
        for name, entry in trainer._extensions.items():
            began = functools.partial(self._switch_to, name)
            entry.trigger = _NotifyingTrigger(entry.trigger, lambda: self._switch_to(""), began)
        # The trainer evaluates it when the extensions of an iteration have returned.
        trainer.stop_trigger = _NotifyingTrigger(trainer.stop_trigger, self._end)
        self._extension = ""
        self._extension_began = self._updated = 0
        self._start: int | None = None
        self._within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def within(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context in each update."""
        self._within = context

    def flush(self) -> None:
        """Add a span for the time that extensions have taken so far."""
        self._switch_to(self._extension)
        now = self._extension_began
        spans.add("extensions", self._updated, now, spans.MAIN)
        self._updated = now

    def _switch_to(self, extension: str) -> None:
        """Add a span for the extension that was running, and start one for the next, if any."""
        now = spans.now()
        if self._extension:
            spans.add(EXTENSION + self._extension, self._extension_began, now, spans.MAIN)
        self._extension, self._extension_began = extension, now

    def _timed_update(self) -> None:
        self._start, self._extension = spans.now(), ""
        with self._within():
            self._update()
        self._updated = spans.now()

    def _end(self) -> None:
        if self._start is not None:
            self._switch_to("")
            self.flush()
            number = {"iteration": self._updater.iteration}
            spans.add("iteration", self._start, self._updated, spans.MAIN, number)
            self._start = None


class _NotifyingTrigger:
    """A trigger that calls functions before it is evaluated and when it fires."""

    def __init__(
        self,
        trigger: Any,
        before: Callable[[], None],
        on_fire: Callable[[], None] = lambda: None,
    ) -> None:
        self._trigger, self._before = trigger, before
        self._on_fire = on_fire

    def __call__(self, trainer: Any) -> Any:
        self._before()
        fires = self._trigger(trainer)
        if fires:
            self._on_fire()
        return fires

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)


def _time_batches_of(kind: type) -> None:
    # Patch the class, because copies of an object would inherit a patched attribute.
    owner: Any = next(base for base in kind.__mro__ if "next" in vars(base))
    if owner not in _iterators:
        _iterators.add(owner)
        owner.next = spans.spanned("data")(owner.next)


def _timed_converter(converter: Any) -> Any:
    @chainer.dataset.converter()
    def convert(batch: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        with spans.span("convert"):
            if args or kwargs:
                return converter(batch, device, *args, **kwargs)
            return _call_converter(converter, batch, device)

    return convert
