"""What it costs to record what every rank does, and to report on it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import TITLES

TITLE = "Timelines and reports"
OFF = "ours, not recorded"
_CONTESTANTS = {
    OFF: ("in a trainer", False),
    "ours, with a timeline": ("in a trainer, recorded", False),
    "ours, with a report": ("in a trainer, reported", True),
}
CASES = (("mlp", 10), ("mlp", 100), ("conv", 8))
# A difference of a hundredth needs more turns than one of a tenth.
_TIMES_ROUNDS = 4


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    place = Place("2 ranks, one host", (2,))
    for network, batchsize in CASES:
        title = f"{TITLES[network]}, batch {batchsize}; {place.title}"
        if not settings.wants(title):
            continue
        options = {"what": "iteration", "network": network, "batchsize": batchsize}
        contestants = [
            Contestant(name, team, {**options, "report": reports})
            for name, (team, reports) in _CONTESTANTS.items()
        ]
        rounds = _TIMES_ROUNDS * settings.rounds
        rows = take_turns(place, contestants, settings, seconds=1, rounds=rounds)
        key = {"network": network, "batchsize": str(batchsize)}
        yield Group(title, key, rows, OFF)
