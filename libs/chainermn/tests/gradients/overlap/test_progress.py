"""What carries on with exchanges beside backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chainermn.gradients.overlap.progress import PollingEngine, ProgressEngine, ThreadEngine


@pytest.fixture(params=[ThreadEngine, PollingEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[ProgressEngine]:
    engine = request.param(n_lanes=2)
    yield engine
    engine.end()


def test_each_exchange_has_the_next_lane(engine: ProgressEngine) -> None:
    lanes = []

    def exchange(lane: int) -> Iterator[None]:
        lanes.append(lane)
        yield

    for future in [engine.submit(exchange) for _ in range(3)]:
        engine.wait(future)
    assert lanes == [0, 1, 0]


def test_what_an_exchange_raises_is_raised_where_it_is_waited_for(engine: ProgressEngine) -> None:
    def fails(lane: int) -> Iterator[None]:
        yield
        raise ZeroDivisionError(lane)

    def succeeds(lane: int) -> Iterator[None]:
        yield

    failing, succeeding = engine.submit(fails), engine.submit(succeeds)
    with pytest.raises(ZeroDivisionError, match="0"):
        engine.wait(failing)
    engine.wait(succeeding)
