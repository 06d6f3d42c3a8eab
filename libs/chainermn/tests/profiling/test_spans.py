"""Spans, which reach listeners and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chainermn import spans
from chainermn.spans import Span


@pytest.fixture
def heard() -> Iterator[list[Span]]:
    found: list[Span] = []
    spans.listen(found.append)
    yield found
    spans.unlisten(found.append)


def test_spans_end_from_the_inside_out(heard: list[Span]) -> None:
    with spans.span("outer", details={"bytes": 3}), spans.span("inner"):
        pass
    inner, outer = heard
    assert (inner.name, outer.name, outer.details) == ("inner", "outer", {"bytes": 3})
    assert inner.track == outer.track == spans.MAIN
    assert outer.start <= inner.start <= inner.end <= outer.end


def test_a_thread_is_a_track_unless_another_is_named(heard: list[Span]) -> None:
    def work() -> None:
        with spans.span("own"), spans.span("named", "exchange 1"):
            pass

    thread = threading.Thread(target=work, name="helper")
    thread.start()
    thread.join()
    assert [(span.name, span.track) for span in heard] == [
        ("named", "exchange 1"),
        ("own", "helper"),
    ]


def test_a_decorated_function_is_measured_when_it_raises_too(heard: list[Span]) -> None:
    @spans.spanned("work")
    def work(number: int) -> float:
        """Divide."""
        return 1 / number

    assert work(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        work(0)
    assert [span.name for span in heard] == ["work", "work"]
    assert work.__doc__ == "Divide."


def test_nothing_is_measured_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_clock() -> Any:
        raise AssertionError("the time was asked")

    monkeypatch.setattr(spans, "now", no_clock)
    assert not spans.are_wanted()
    with spans.span("work"):
        spans.add("other", 1, 2)
