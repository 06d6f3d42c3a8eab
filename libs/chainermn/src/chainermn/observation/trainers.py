"""Spans of what a trainer does: iterations, batches, extensions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer.dataset.convert import _call_converter

from chainermn import spans

_observed: weakref.WeakKeyDictionary[Any, Observation] = weakref.WeakKeyDictionary()


def observe(trainer: chainer.training.Trainer) -> Observation:
    """Have spans made of what a trainer does from its next iteration on, if anybody listens.

    To be called before its training begins, or by an extension when it is initialized.
    """
    if trainer not in _observed:
        _observed[trainer] = Observation(trainer)
    return _observed[trainer]


class Observation:
    """Spans of what a trainer does.

    An iteration lasts from one update to the next. What comes after the update is the time of the
    extensions.
    """

    def __init__(self, trainer: chainer.training.Trainer) -> None:
        updater = self._updater = trainer.updater
        self._update: Callable[[], None] = updater.update
        updater.update = self._observed_update
        for iterator in vars(updater).get("_iterators", {}).values():
            # Past the iterators that set attributes on another one.
            vars(iterator)["next"] = spans.spanned("data")(iterator.next)
        if hasattr(updater, "converter"):
            updater.converter = _observed_converter(updater.converter)
        for name, entry in trainer._extensions.items():
            entry.trigger = _ObservedTrigger(entry.trigger, name, self)
        self._extension = ""
        self._extension_began = 0
        self._start = self._updated = 0
        self._within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def within(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter a context in each update."""
        self._within = context

    def end(self) -> None:
        """End the current iteration."""
        if self._start:
            self.tell()
            number = {"iteration": self._updater.iteration}
            spans.add("iteration", self._start, self._updated, spans.MAIN, number)
            self._start = 0

    def tell(self) -> None:
        """Tell of the time that extensions have taken so far."""
        self.turn_to(self._extension)
        now = self._extension_began
        spans.add("extensions", self._updated, now, spans.MAIN)
        self._updated = now

    def turn_to(self, extension: str) -> None:
        """Tell of the extension that has been at work, as it is the turn of another one."""
        now = spans.now()
        if self._extension:
            name = f"extension {self._extension}"
            spans.add(name, self._extension_began, now, spans.MAIN)
        self._extension, self._extension_began = extension, now

    def _observed_update(self) -> None:
        self.end()
        self._extension = ""
        self._start = spans.now()
        with self._within():
            self._update()
        self._updated = spans.now()


class _ObservedTrigger:
    """Is asked right before its extension is called, and when all before it have returned."""

    def __init__(self, trigger: Any, name: str, observation: Observation) -> None:
        self._trigger, self._name, self._observation = trigger, name, observation

    def __call__(self, trainer: Any) -> Any:
        self._observation.turn_to("")
        fires = self._trigger(trainer)
        if fires:
            self._observation.turn_to(self._name)
        return fires

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trigger, name)


def _observed_converter(converter: Any) -> Any:
    @chainer.dataset.converter()
    def convert(batch: Any, device: Any) -> Any:
        with spans.span("convert"):
            return _call_converter(converter, batch, device)

    return convert
