"""Scatter a data set: the time, and the memory of a rank that receives."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

from benchmarks.figures import Group, Measured
from benchmarks.harness import (
    ONE_THREAD,
    THE_ORIGINAL,
    Contestant,
    Place,
    Settings,
    Team,
    running,
    slowest,
)

ORIGINAL = "original"
ROW_BYTES = 784 * 4 + 4
LENGTHS = {"arrays": 60_000, "pairs": 1_281_167}
ENVIRONMENTS = {"ours": ONE_THREAD, ORIGINAL: {**ONE_THREAD, **THE_ORIGINAL}}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    for data, length in LENGTHS.items():
        size = f"{ROW_BYTES * length / 1e6:.0f} MB of arrays"
        title = size if data == "arrays" else f"{length / 1e6:.2f} M pairs of path and label"
        if settings.wants(title):
            yield measure_data(data, title, settings)


def measure_data(data: str, title: str, settings: Settings) -> Group:
    """Measure one kind of data set. Every turn is a new job."""
    place = Place("2 ranks, one host", (2,))
    options = {"data": data, "length": LENGTHS[data] // (20 if settings.quick else 1)}
    rows = {name: Measured(name) for name in ENVIRONMENTS}
    received: dict[str, list[dict[str, float]]] = {name: [] for name in ENVIRONMENTS}
    for _ in range(settings.rounds):
        for name, env in ENVIRONMENTS.items():
            settings.tell(f"{title}: {name}")
            with running({name: functools.partial(Team, place, "scattering", env=env)}) as teams:
                teams[name].start(Contestant(name, name, options), 1)
                answers = teams[name].finish()
            rows[name].seconds.append(slowest(answers))
            received[name].append(answers[1])
    for name, found in received.items():
        for head, key in (("MB at most", "peak"), ("MB in the end", "kept")):
            rows[name].more[head] = statistics.median(rank[key] for rank in found) / 1e6
    return Group(f"{title}, {place.title}", {"data": data}, list(rows.values()), ORIGINAL)
