"""Fit the cost model to jobs with few ranks, and check it with many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from benchmarks import cost_model, report
from benchmarks.cost_model import Job
from benchmarks.figures import Group, load, milliseconds
from benchmarks.harness import Contestant, Place, Settings, places, take_turns

SIZES = (4_000, 64_000, 400_000, 4_000_000)
#: Hosts and ranks per host: jobs to fit, whose links have no limit, and jobs to check at 1 Gbit/s.
FITTED = ((1, 2), (1, 4), (1, 8), (1, 10), (1, 16), (2, 1), (4, 1), (8, 1))
CHECKED = ((1, 32), (1, 64), (16, 1), (16, 2))
#: With a larger error, a prediction has failed.
MOST = 0.15
#: Kinds of jobs that have costs of their own, because the ranks work differently.
KINDS: dict[str, Callable[[Job], bool]] = {
    "one host": lambda job: job.hosts == 1 and not cost_model.takes_turns(job),
    "one host, where each rank adds in its turn": cost_model.takes_turns,
    "several hosts": lambda job: job.hosts > 1,
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    for hosts, per_host in (*FITTED, *CHECKED):
        title = title_of(hosts, per_host)
        rate = "off" if (hosts, per_host) in FITTED else "1gbit"
        where = {title: (per_host,) * hosts} if settings.wants(title) else {}
        for place in places(where, rate):
            yield place if isinstance(place, str) else measure_at(place, settings)


def title_of(hosts: int, per_host: int) -> str:
    """Return the title of a place."""
    if hosts == 1:
        return f"{per_host} ranks, one host"
    return f"{hosts * per_host} ranks, {hosts} hosts"


def measure_at(place: Place, settings: Settings) -> Group:
    """Measure exchanges of arrays."""
    options = {"what": "exchange", "communicator": "naive"}
    contestants = [
        Contestant(str(n), "ours", {**options, "network": f"array of {n}"}) for n in SIZES
    ]
    rows = take_turns(place, contestants, settings, seconds=0.3)
    hosts, per_host = len(place.ranks), place.ranks[0]
    key = {"hosts": str(hosts), "per_host": str(per_host), "cores": str(os.cpu_count())}
    return Group(place.title, key, rows, rows[0].name)


def write(part: str) -> None:
    """Write the page: costs and predictions for one host and for several."""
    lines = []
    # The model counts MPICH's collectives, so there is no other MPI.
    for content in load(part).values():
        lines += ["", "## Figures", "", *report.describe_run(content)]
        measured = list(points(content["groups"]))
        for kind, is_of_kind in KINDS.items():
            jobs = [(job, seconds) for job, seconds in measured if is_of_kind(job)]
            if any(is_fitted(job) for job, _ in jobs):
                lines += ["", f"### {kind.capitalize()}", "", *describe(jobs)]
    report.write_page(part, lines)


def points(groups: list[Group]) -> Iterator[tuple[Job, float]]:
    """Yield jobs and their times in seconds."""
    for group in sorted(groups, key=lambda group: [int(value) for value in group.key.values()]):
        for row in group.rows:
            if row.seconds:
                yield Job(float(row.name), *map(int, group.key.values())), row.median


def is_fitted(job: Job) -> bool:
    """Return whether costs are fitted to this job."""
    return (job.hosts, job.per_host) in FITTED


def describe(jobs: list[tuple[Job, float]]) -> list[str]:
    """Return a table of costs, a table of predictions, and a list of those that failed."""
    machine = cost_model.fit(*zip(*(it for it in jobs if is_fitted(it[0])), strict=True))
    lines = report.heads_of(["one of these", "costs"])
    for name, value in vars(machine).items():
        unit, scale = ("ns", 1e9) if name.endswith("bytes") else ("µs", 1e6)
        lines.append(report.line([name.replace("_", " "), f"{scale * value:.3g} {unit}"]))
    heads = ["job", "kB", "measured, ms", "predicted", "cores", "link", "error, %"]
    lines += ["", *report.heads_of(heads)]
    failed = []
    for job, seconds in jobs:
        cores = cost_model.cores(job, machine)
        link = 0.0 if is_fitted(job) else cost_model.link(job)
        error = max(cores, link) / seconds - 1
        where = f"{title_of(job.hosts, job.per_host)}{', fitted' * is_fitted(job)}"
        times = map(milliseconds, (seconds, max(cores, link), cores, link))
        size = f"{job.n_bytes / 1e3:.0f}"
        lines.append(report.line([where, size, *times, f"{100 * error:+.0f}"]))
        if abs(error) > MOST and not is_fitted(job):
            failed.append(f"{where}, {size} kB")
    off = "; ".join(failed) or "none"
    return [*lines, "", f"- Predictions that are off by more than {100 * MOST:.0f} %: {off}"]
