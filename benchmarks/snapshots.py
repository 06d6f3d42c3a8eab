"""How much time a snapshot takes from training, with each of Chainer's writers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import ITERATIONS, SNAPSHOT_UNITS

WITHOUT = "no snapshots"
WRITERS = ("SimpleWriter", "ThreadWriter", "ThreadQueueWriter")


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    place = Place("2 ranks, one host", (2,))
    contestants = [Contestant(WITHOUT, "snapshots", {"writer": None, "compression": False})]
    for writer in WRITERS:
        for compression in (True, False):
            name = writer if compression else f"{writer}, not compressed"
            options = {"writer": writer, "compression": compression}
            contestants.append(Contestant(name, "snapshots", options))
    rows = take_turns(place, contestants, settings, seconds=10.0)
    for row in rows[1:]:
        costs = [mine - none for mine, none in zip(row.seconds, rows[0].seconds, strict=True)]
        row.more["seconds per snapshot"] = statistics.median(costs)
    layers = "-".join(map(str, SNAPSHOT_UNITS))
    title = f"{ITERATIONS} iterations and a snapshot, MLP {layers}, {place.title}"
    yield Group(title, {"writers": "all"}, rows, WITHOUT)
