"""A call from a trainer's extension carries the extension's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chainer.training import Extension, Trainer, make_extension

import chainermn.communicators  # noqa: F401 - so that calls know their callers
from chainermn.failures.activity import MarkedCall, waits


def callers() -> list[str]:
    """Return who makes the calls in progress."""
    return [wait.caller for wait, _ in waits()]


class Asks(Extension):
    """An extension that makes a call whenever a trainer calls it, some functions deeper."""

    default_name = "asks"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ask(self) -> None:
        with MarkedCall("communicator 7 of ranks 0-1", "allreduce", "0-1"):
            self.seen += callers()

    def initialize(self, trainer: Trainer) -> None:
        self.ask()

    def __call__(self, trainer: Trainer) -> None:
        self.ask()


@pytest.fixture
def run() -> Any:
    def run(*extensions: Any, update: Any = lambda: None) -> None:
        updater = SimpleNamespace(
            get_all_optimizers=dict,
            connect_trainer=lambda trainer: None,
            iteration=0,
            update=update,
            finalize=lambda: None,
        )
        runs = iter([False, False, True])
        trainer = Trainer(updater, stop_trigger=lambda trainer: next(runs), out=".")
        for extension in extensions:
            trainer.extend(extension, trigger=lambda trainer: True)
        trainer.run()

    return run


def test_each_of_two_of_a_kind_has_its_name(run: Any) -> None:
    first, second = Asks(), Asks()
    run(first, second)
    # Once when initialized, and once in each of two iterations.
    assert first.seen == ["extension 'asks' (Asks)"] * 3
    assert second.seen == ["extension 'asks_1' (Asks)"] * 3


def test_function(run: Any) -> None:
    asks = Asks()

    @make_extension()
    def report(trainer: Trainer) -> None:
        asks.ask()

    run(report)
    assert asks.seen == ["extension 'report' (function)"] * 2


def test_update_is_nobodys(run: Any) -> None:
    asks = Asks()
    idle = make_extension()(lambda trainer: None)
    run(idle, update=asks.ask)
    assert asks.seen == ["", ""]


def test_call_without_a_trainer_is_nobodys() -> None:
    asks = Asks()
    asks.ask()
    assert asks.seen == [""]
