"""The cost of a timeline, and of a report on the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import overhead
from benchmarks.figures import Group
from benchmarks.harness import Contestant, Settings

OFF = "ours, not recorded"
_CONTESTANTS = {
    OFF: ("in a trainer", False),
    "ours, with a timeline": ("in a trainer, recorded", False),
    "ours, with a report": ("in a trainer, reported", True),
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    yield from overhead.measure(settings, _contestants, OFF)


def _contestants(network: str, batchsize: int) -> list[Contestant]:
    options = {"what": "iteration", "network": network, "batchsize": batchsize}
    return [
        Contestant(name, team, {**options, "report": reports})
        for name, (team, reports) in _CONTESTANTS.items()
    ]
