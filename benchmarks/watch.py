"""What the watch over failures costs in an iteration."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import overhead
from benchmarks.figures import Group
from benchmarks.harness import Contestant, Settings

TITLE = "The watch over failures"
OFF = "ours, not watched"


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    yield from overhead.measure(settings, _contestants, OFF)


def _contestants(network: str, batchsize: int) -> list[Contestant]:
    options = {"what": "iteration", "communicator": "naive"}
    return [
        Contestant(name, team, {**options, "network": network, "batchsize": batchsize})
        for name, team in ((OFF, "not watched"), ("ours", "ours"))
    ]
