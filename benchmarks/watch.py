"""What the watch over failures costs in an iteration."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Contestant, Place, Team, running, take_turns
from benchmarks.networks import TITLES
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "The watch over failures"
INTRODUCTION = """\
Whole iterations with the watch that `create_communicator` starts, and without it and the marks
that it needs around calls, on two ranks of one host. The two are measured in turn. An iteration of
the MLP with 10 examples is about as short as one can be."""

OFF, ON = "ours, not watched", "ours"
BATCHES = {"mlp": (10, 100), "conv": (8,)}
# A difference of a hundredth needs more turns than one of a tenth.
_ROUNDS = 4


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    place = Place("2 ranks, one host", (2,))
    groups = []
    for network, batches in BATCHES.items():
        for batchsize in batches:
            title = f"{TITLES[network]}, batch {batchsize}; {place.title}"
            if settings.wants(title):
                groups.append(measure_one(place, title, network, batchsize, settings))
    return groups, []


def measure_one(
    place: Place, title: str, network: str, batchsize: int, settings: Settings
) -> Group:
    """Measure iterations of one network."""
    options: dict[str, Any] = {"what": "iteration", "communicator": "naive"}
    options |= {"network": network, "batchsize": batchsize}
    teams = {
        OFF: lambda: Team(place, "unwatched"),
        ON: lambda: Team(place, "with_chainer"),
    }
    with running(teams) as started:
        rows = take_turns(
            started,
            [Contestant(name, name, options) for name in teams],
            rounds=1 if settings.quick else _ROUNDS * settings.rounds,
            seconds=settings.seconds(1),
            tell=settings.teller(title),
        )
    return Group(title, {"network": network, "batchsize": str(batchsize)}, rows, OFF)
