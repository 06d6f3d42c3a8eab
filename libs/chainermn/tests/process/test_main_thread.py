"""Where the main thread is, as seen from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from chainermn.process import main_thread
from chainermn.process.main_thread import main_stack


def call_in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_innermost_call_first() -> None:
    inner, outer, *_ = (place for place in call_in_thread(main_stack) if place.file == __file__)
    assert inner.function == "call_in_thread"
    assert outer.function == "test_innermost_call_first"
    assert int(outer.line) == test_innermost_call_first.__code__.co_firstlineno + 1


def test_place_is_the_users_and_what_it_calls() -> None:
    place = call_in_thread(main_thread.place)
    users, inner = place.split(", now in ")
    assert users.startswith(f"{__file__}:")
    assert users.endswith(" in call_in_thread")
    assert "threading.py:" in inner


def test_while_the_main_thread_runs() -> None:
    over = threading.Event()
    seen: set[str] = set()

    def look() -> None:
        while not over.is_set():
            seen.update(place.function for place in main_stack()[:3])

    def descend(depth: int) -> int:
        return depth and descend(depth - 1) + sum(range(depth))

    thread = threading.Thread(target=look)
    thread.start()
    while "descend" not in seen and thread.is_alive():  # if it never comes, pytest times out
        descend(20)
    over.set()
    thread.join()
    assert "descend" in seen
