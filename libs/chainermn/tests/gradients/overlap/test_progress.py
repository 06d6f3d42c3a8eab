"""The progress of exchanges while backward runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.gradients.overlap.progress import ProgressEngine
from chainermn.transport.host.mpi import ThreadSupport


@pytest.fixture(params=["multiple", "serialized", "funneled"])
def engine(request: pytest.FixtureRequest) -> Iterator[ProgressEngine]:
    with engine_with(request.param) as made:
        yield made


@pytest.fixture
def taking_turns() -> Iterator[ProgressEngine]:
    with engine_with("serialized") as made:
        yield made


@contextlib.contextmanager
def engine_with(support: ThreadSupport) -> Iterator[ProgressEngine]:
    """Make an engine for the ``with`` block; its thread ends with it."""
    before = set(threading.enumerate())
    streams: Any = [0, 1]
    engine = ProgressEngine(streams, support)
    yield engine
    engine.end()
    assert before.issuperset(threading.enumerate())


def test_each_exchange_has_the_next_stream(engine: ProgressEngine) -> None:
    streams = []

    def exchange(stream: Any) -> Iterator[None]:
        streams.append(stream)
        yield

    for future in [engine.submit(exchange) for _ in range(3)]:
        engine.wait(future)
    assert streams == [0, 1, 0]


def test_what_an_exchange_raises_is_raised_where_it_is_waited_for(engine: ProgressEngine) -> None:
    def fails(stream: Any) -> Iterator[None]:
        yield
        raise ZeroDivisionError(stream)

    def succeeds(stream: Any) -> Iterator[None]:
        yield

    failing, succeeding = engine.submit(fails), engine.submit(succeeds)
    with pytest.raises(ZeroDivisionError, match="0"):
        engine.wait(failing)
    engine.wait(succeeding)


class OfAUser(chainer.FunctionNode):
    """A function whose backward calls a given function, which may call MPI."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        self._act()
        return grad_outputs


class OfChainer(OfAUser):
    __module__ = "chainer.functions.of_a_test"


def backward_through(*functions: chainer.FunctionNode) -> None:
    variable = chainer.Variable(np.ones((), np.float32))
    for function in functions:
        (variable,) = function.apply((variable,))
    variable.backward()


def test_an_exchange_advances_while_a_function_of_chainer_computes(
    taking_turns: ProgressEngine,
) -> None:
    steps: list[threading.Thread] = []
    has_stepped = threading.Event()

    def exchange(stream: Any) -> Iterator[None]:
        for _ in range(3):
            steps.append(threading.current_thread())
            yield
        has_stepped.set()

    future = taking_turns.submit(exchange)
    with taking_turns.in_backward():
        backward_through(OfChainer(lambda: has_stepped.wait(60)))
    assert has_stepped.is_set()
    assert threading.current_thread() not in steps
    taking_turns.wait(future)


def test_none_advances_while_other_functions_do_what_they_like(
    taking_turns: ProgressEngine,
) -> None:
    in_step = threading.Event()
    is_over = threading.Event()
    seen = []

    def exchange(stream: Any) -> Iterator[None]:
        while not is_over.is_set():
            in_step.set()
            time.sleep(1e-3)  # as if in an MPI call
            in_step.clear()
            yield

    def look() -> None:
        for _ in range(5):
            time.sleep(2e-3)
            seen.append(in_step.is_set())

    def fail() -> None:
        raise ZeroDivisionError

    future = taking_turns.submit(exchange)
    with taking_turns.in_backward():
        of_chainer = [OfChainer(lambda: in_step.wait(60)) for _ in range(3)]
        pairs = [each for function in of_chainer for each in (OfAUser(look), function)]
        backward_through(*pairs)
        look()
    with pytest.raises(ZeroDivisionError), taking_turns.in_backward():
        backward_through(OfChainer(fail))
    look()
    assert seen == [False] * 25
    is_over.set()
    taking_turns.wait(future)


@pytest.mark.parametrize("is_local", [False, True])
def test_none_advances_where_a_hook_of_a_user_may_do_what_it_likes(
    taking_turns: ProgressEngine, is_local: bool
) -> None:
    threads = []

    class Hook(chainer.FunctionHook):
        """A hook that could do anything before and after a function."""

    def exchange(stream: Any) -> Iterator[None]:
        for _ in range(3):
            threads.append(threading.current_thread())
            yield

    function = OfChainer(lambda: time.sleep(0.01))
    if is_local:
        function.add_hook(Hook())
    future = taking_turns.submit(exchange)
    with contextlib.nullcontext() if is_local else Hook(), taking_turns.in_backward():
        backward_through(function)
    taking_turns.wait(future)
    assert threads == [threading.current_thread()] * 3


def test_after_functions_of_a_user_the_training_thread_advances_exchanges(
    engine: ProgressEngine,
) -> None:
    has_stepped = threading.Event()

    def exchange(stream: Any) -> Iterator[None]:
        has_stepped.set()
        yield

    future = engine.submit(exchange)
    with engine.in_backward():
        backward_through(OfAUser(lambda: None), OfAUser(lambda: None))
        assert has_stepped.wait(60)
    engine.wait(future)


def test_none_begins_after_the_end(taking_turns: ProgressEngine) -> None:
    begun = []

    def exchange(stream: Any) -> Iterator[None]:
        begun.append(threading.current_thread())
        yield

    taking_turns.submit(exchange)
    taking_turns.end()
    assert not begun


def test_exchanges_advance_while_the_training_thread_waits_for_something_else(
    engine: ProgressEngine,
) -> None:
    has_advanced = threading.Event()

    def exchange(stream: Any) -> Iterator[None]:
        yield
        has_advanced.set()

    class Request:
        """A request that completes as soon as the exchange has advanced."""

        def Test(self) -> bool:
            return has_advanced.is_set()

        def Wait(self) -> None:
            assert has_advanced.wait(60)

    future = engine.submit(exchange)
    engine.wait_for_mpi(Request())
    assert has_advanced.is_set()
    engine.wait(future)
