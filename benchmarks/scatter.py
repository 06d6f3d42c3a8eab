"""The scattering of a data set: its time, and the memory of a rank that receives."""

from __future__ import annotations

import statistics

from benchmarks.harness import ONE_THREAD, THE_ORIGINAL, Contestant, Measured, Place, Team
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "scatter_dataset"
INTRODUCTION = """\
Rank 0 has the data set, each rank gets its part, shuffled. Every turn is a new job of two ranks on
one host, ours and the original in turn. Memory is that of rank 1, which only receives: by how much
its resident set grows at most, and in the end. Before each turn half a gigabyte is taken and given
back: a virtual machine, whose host takes away what is free for some seconds, would else spend most
of the time on getting memory."""

ORIGINAL = "original"
ROW_BYTES = 784 * 4 + 4
LENGTHS = {"arrays": 60_000, "pairs": 1_281_167}
#: What a receiving rank gets at once: its share of the rounds of `chainermn.datasets.shards`.
CHUNK_BYTES = 16 * 2**20


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    return [measure_data(data, settings) for data in LENGTHS if settings.wants(data)], []


def measure_data(data: str, settings: Settings) -> Group:
    """Measure with one kind of data set."""
    length = LENGTHS[data] // (20 if settings.quick else 1)
    place = Place("2 ranks, one host", (2,))
    environments = {"ours": ONE_THREAD, ORIGINAL: {**ONE_THREAD, **THE_ORIGINAL}}
    rows = {name: Measured(name) for name in environments}
    memory: dict[str, list[tuple[int, int]]] = {name: [] for name in environments}
    what = f"{ROW_BYTES * length / 1e6:.0f} MB of arrays"
    title = what if data == "arrays" else f"{length / 1e6:.2f} M pairs of path and label"
    tell = settings.teller(title)
    for _ in range(settings.rounds):
        for name, env in environments.items():
            tell(name)
            team = Team(place, "scattering", env=env)
            try:
                team.start(Contestant(name, "", {"data": data, "length": length}), 1)
                turn = team.finish()
            finally:
                team.close()
            rows[name].seconds.append(turn.seconds)
            memory[name].append((turn.others["peak"][1], turn.others["kept"][1]))
    for name, found in memory.items():
        most, kept = (statistics.median(column) / 1e6 for column in zip(*found, strict=True))
        rows[name].more = {"MB at most": most, "MB in the end": kept}
    group = Group(f"{title}, {place.title}", {"data": data}, list(rows.values()), ORIGINAL)
    if data == "arrays":
        shard = ROW_BYTES * length / 2
        group.key["memory_bound"] = f"{(shard + CHUNK_BYTES) / 1e6:.1f}"
        group.notes.append(
            f"A rank's shard has {shard / 1e6:.1f} MB, one chunk of it at most "
            f"{CHUNK_BYTES / 1e6:.1f} MB: together {(shard + CHUNK_BYTES) / 1e6:.1f} MB."
        )
    return group
