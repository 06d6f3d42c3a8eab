"""What the watch over failures costs in an iteration."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import TITLES

TITLE = "The watch over failures"
OFF = "ours, not watched"
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
        options = {"what": "iteration", "communicator": "naive"}
        key = {"network": network, "batchsize": str(batchsize)}
        contestants = [
            Contestant(name, team, {**options, "network": network, "batchsize": batchsize})
            for name, team in ((OFF, "not watched"), ("ours", "ours"))
        ]
        rounds = _TIMES_ROUNDS * settings.rounds
        rows = take_turns(place, contestants, settings, seconds=1, rounds=rounds)
        yield Group(title, key, rows, OFF)
