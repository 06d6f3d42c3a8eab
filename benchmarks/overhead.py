"""Measure the overhead of something: iterations with it and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import TITLES

CASES = (("mlp", 10), ("mlp", 100), ("conv", 8))
# A difference of one per cent needs more turns than one of ten.
_TIMES_ROUNDS = 4


def measure(
    settings: Settings,
    contestants_of: Callable[[str, int], Sequence[Contestant]],
    reference: str,
) -> Iterator[Group]:
    """Yield a group for each network and batch size.

    ``reference`` is the name of the contestant without the overhead.
    """
    place = Place("2 ranks, one host", (2,))
    for network, batchsize in CASES:
        title = f"{TITLES[network]}, batch {batchsize}; {place.title}"
        if not settings.wants(title):
            continue
        contestants = contestants_of(network, batchsize)
        rounds = _TIMES_ROUNDS * settings.rounds
        rows = take_turns(place, contestants, settings, seconds=1, rounds=rounds)
        key = {"network": network, "batchsize": str(batchsize)}
        yield Group(title, key, rows, reference)
