"""What carries on with exchanges beside backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chainermn.gradients.overlap.progress import ProgressEngine


@pytest.fixture(params=[True, False], ids=["in a thread", "between functions"])
def engine(request: pytest.FixtureRequest) -> Iterator[ProgressEngine]:
    lanes: Any = [0, 1]
    engine = ProgressEngine(lanes, in_thread=request.param)
    yield engine
    engine.end()


def test_each_exchange_has_the_next_lane(engine: ProgressEngine) -> None:
    lanes = []

    def exchange(lane: Any) -> Iterator[None]:
        lanes.append(lane)
        yield

    for future in [engine.submit(exchange) for _ in range(3)]:
        engine.wait(future)
    assert lanes == [0, 1, 0]


def test_what_an_exchange_raises_is_raised_where_it_is_waited_for(engine: ProgressEngine) -> None:
    def fails(lane: Any) -> Iterator[None]:
        yield
        raise ZeroDivisionError(lane)

    def succeeds(lane: Any) -> Iterator[None]:
        yield

    failing, succeeding = engine.submit(fails), engine.submit(succeeds)
    with pytest.raises(ZeroDivisionError, match="0"):
        engine.wait(failing)
    engine.wait(succeeding)
