"""The marks around calls."""

from __future__ import annotations

import threading

from chainermn.failures.activity import MarkedCall, waiting_for, waits
from chainermn.failures.wait import Wait

CALL = ("communicator 7 of ranks 0-1", "allreduce", "0-1")


def calls() -> list[tuple[str, bool]]:
    return [(wait.operation, is_main) for wait, is_main in waits()]


def test_inner_calls_have_no_mark() -> None:
    with MarkedCall(*CALL):
        with MarkedCall("another stream", "bcast", "0-1"):
            assert calls() == [("allreduce", True)]
        assert calls() == [("allreduce", True)]
    assert calls() == []


def test_calls_are_numbered() -> None:
    numbers = []
    for _ in range(2):
        with MarkedCall(*CALL):
            numbers += [wait.number for wait, _ in waits()]
    assert numbers[1] == numbers[0] + 1


def test_who_waits_for_a_thread_waits_for_what_that_does() -> None:
    is_in_call, may_end = threading.Event(), threading.Event()

    def run() -> None:
        with MarkedCall(*CALL):
            is_in_call.set()
            may_end.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_in_call.wait(60)
    assert calls() == [("allreduce", False)]
    with waiting_for(thread.ident or 0):
        assert calls() == [("allreduce", True)]
    assert calls() == [("allreduce", False)]
    may_end.set()
    thread.join()


def test_ranks_of_a_call() -> None:
    assert Wait(*CALL[:1], 1, CALL[1], "0-1,4", 0.0).ranks == (0, 1, 4)
