"""The cost model: fitted on what is measured here, checked, and drawn to 1,024 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import cost_model, report
from benchmarks.cost_model import ALGORITHMS, Compute, Counts, Job
from benchmarks.harness import Contestant, Place, Team, emulated_hosts, running, take_turns
from benchmarks.networks import TITLES
from benchmarks.ranks import networks
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "Which communicator when: the cost model"
INTRODUCTION = """\
What `benchmarks/cost_model.py` says, which has the formulas and their sources, after it was fitted
on the exchange of single arrays and checked on whole exchanges of gradients, by other algorithms
and on other placements of the ranks, that it had not seen. It speaks of several hosts. On one it
takes each copy to be one in the cache, which the copies of `flat` are not;
[the exchange alone](exchange.md) has been measured there."""

SIZES = [2**k for k in (8, 11, 14, 16, 18, 20, 22, 24)]
#: Hosts, and ranks on each, of what the model is fitted on, and of what it is checked on.
FITTED = [(1, 2), (2, 1)]
CHECKED = [(2, 2), (4, 1)]
CHECKED_NETWORK = "conv"
IN_CACHE = 2**18  # bytes that are added and copied at a time


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    groups = [measure_at(Place("1 host, 2 ranks", (2,)), FITTED[0], settings)]
    with emulated_hosts(4, "1gbit") as cluster:
        if isinstance(cluster, str):
            return groups, [f"links, and so the model: {cluster}"]
        for hosts, per_host in (*FITTED[1:], *CHECKED):
            title = f"{hosts} hosts at 1 Gbit/s, {per_host} rank{'s' * (per_host > 1)} on each"
            place = Place(title, (per_host,) * hosts, cluster)
            groups.append(measure_at(place, (hosts, per_host), settings))
    return groups, []


def measure_at(place: Place, where: tuple[int, int], settings: Settings) -> Group:
    """Measure what the model is fitted on, or checked on."""
    if where in CHECKED:
        teams = {"ours": lambda: Team(place, "with_chainer")}
        options = {"what": "exchange", "network": CHECKED_NETWORK}
        contestants = [
            Contestant(name, "ours", {**options, "communicator": name}) for name in ALGORITHMS
        ]
    else:
        teams = {
            "ours": lambda: Team(place, "with_chainer"),
            "mpi": lambda: Team(place, "with_mpi"),
        }
        array = {"what": "exchange", "communicator": "naive"}
        contestants = [
            Contestant(str(n), "ours", {**array, "network": f"array of {n}"}) for n in SIZES
        ]
        contestants += [
            Contestant(what, "mpi", {"what": what, "n_bytes": IN_CACHE})
            for what in ("add", "memcpy")
        ]
    with running(teams) as started:
        rows = take_turns(
            started,
            contestants,
            rounds=settings.rounds,
            seconds=settings.seconds(0.2),
            tell=settings.teller(place.title),
        )
    key = {"hosts": str(where[0]), "per_host": str(where[1])}
    return Group(place.title, key, rows, rows[0].name)


@dataclass(frozen=True)
class Point:
    """A measured time beside what the model says."""

    title: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.measured - 1


def fit(groups: list[Group]) -> Counts:
    """Return the costs of the machine that was measured."""
    local = [group for group in groups if group.row("memcpy").seconds]
    per_byte = [(group.row("add").median, group.row("memcpy").median) for group in local[:1]]
    (added, copied) = (seconds / IN_CACHE for seconds in per_byte[0])
    counts, seconds = [], []
    for group in local:
        for row in group.rows:
            if row.name.isdigit():
                counts.append(cost_model.naive(Job(*place_of(group), (float(row.name),))))
                seconds.append(row.median)
    return cost_model.fit(counts, seconds, Counts(added_bytes=added, copied_bytes=copied))


def check(groups: list[Group], machine: Counts) -> list[Point]:
    """Return what was measured of exchanges that the model has not seen, beside its times."""
    tensors = tensors_of(CHECKED_NETWORK)
    points = []
    for group in groups:
        for row in group.rows:
            if row.name in ALGORITHMS and row.seconds:
                counts = ALGORITHMS[row.name](Job(*place_of(group), tensors))
                title = f"{row.name}, {TITLES[CHECKED_NETWORK]}, {group.title}"
                points.append(Point(title, row.median, counts.seconds(machine)))
    return points


def place_of(group: Group) -> tuple[int, int]:
    """Return the hosts, and the ranks on each, of what was measured."""
    return int(group.key["hosts"]), int(group.key["per_host"])


def tensors_of(network: str) -> tuple[float, ...]:
    """Return the bytes of each parameter's gradient."""
    return tuple(4.0 * parameter.size for parameter in networks.make(network).model.params())


#: What links cost that nobody here has: seconds a message, bits a second.
ASSUMED_LINKS = {"10 Gbit/s": (30e-6, 10e9), "100 Gbit/s": (10e-6, 100e9)}
MEASURED_LINK = "1 Gbit/s, as measured"
PER_HOST = 8
MOST_RANKS = 1024


def machines(measured: Counts) -> dict[str, Counts]:
    """Return this machine with the link that was measured, and with faster ones."""
    found = {MEASURED_LINK: measured}
    for name, (latency, bits) in ASSUMED_LINKS.items():
        found[f"{name} (assumed)"] = replace(measured, link_messages=latency, link_bytes=8 / bits)
    return found


def jobs(tensors: tuple[float, ...]) -> Iterator[Job]:
    """Yield jobs of 16 to 1,024 ranks, on two hosts and more."""
    hosts = 2
    while hosts * PER_HOST <= MOST_RANKS:
        yield Job(hosts, PER_HOST, tensors)
        hosts *= 2


def write() -> None:
    """Write ``docs/results/model.md`` and ``.png`` from all that has been saved."""
    lines = [f"# {TITLE}", "", INTRODUCTION, ""]
    for mpi, content in report.load("model").items():
        lines += [f"## {report.NAMES[mpi]}", "", *report.describe(content["about"]), ""]
        groups = content["groups"]
        if len(groups) > 1:
            machine = fit(groups)
            picture = f"model-{mpi}.png"
            draw(machine, report.RESULTS / picture)
            lines += [f"![]({picture})", "", *describe_fit(machine, groups), ""]
            lines += [*describe_choice(machine), ""]
        lines += [f"- Not measured: {reason}" for reason in content["skipped"]]
    path = report.RESULTS / "model.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def describe_fit(machine: Counts, groups: list[Group]) -> list[str]:
    """Return the costs that were found, and how well they predict."""
    units = [
        ("a message between hosts", machine.link_messages, 1e6, "µs"),
        ("a byte between hosts", machine.link_bytes, 1e9, "ns"),
        ("a message inside a host", machine.host_messages, 1e6, "µs"),
        ("a byte inside a host", machine.host_bytes, 1e9, "ns"),
        ("a byte of a sum", machine.added_bytes, 1e9, "ns"),
        ("a byte copied", machine.copied_bytes, 1e9, "ns"),
    ]
    lines = ["| costs | |", "| --- | ---: |"]
    lines += [f"| {name} | {value * scale:.3f} {unit} |" for name, value, scale, unit in units]
    lines += ["", "| checked on | measured, ms | predicted, ms | error |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    for point in check(groups, machine):
        cells = [report.milliseconds(seconds) for seconds in (point.measured, point.predicted)]
        lines.append(f"| {point.title} | {' | '.join(cells)} | {point.error:+.0%} |")
    return lines


def describe_choice(machine: Counts) -> list[str]:
    """Return a table: which communicator is the fastest, and how long it takes."""
    lines = [f"The fastest communicator and its time, with {PER_HOST} ranks on each host:", ""]
    networks_ = ("mlp", "resnet50")
    hosts = (2, 16, 128)
    heads = ["gradients of", "link", *(f"{n * PER_HOST} ranks" for n in hosts)]
    lines += [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * len(hosts)}"]
    for network in networks_:
        tensors = tensors_of(network)
        for link, costs in machines(machine).items():
            cells = []
            for n in hosts:
                seconds = exchange_seconds(Job(n, PER_HOST, tensors), costs)
                best = min(seconds, key=seconds.__getitem__)
                cells.append(f"{best} {report.milliseconds(seconds[best])} ms")
            lines.append(f"| {TITLES[network]} | {link} | {' | '.join(cells)} |")
    return lines


def exchange_seconds(job: Job, machine: Counts) -> dict[str, float]:
    """Return the times of all algorithms that work there."""
    return {name: count(job).seconds(machine) for name, count in ALGORITHMS.items()}


def draw(machine: Counts, path: Any) -> None:
    """Draw exchanges, and iterations, over the number of ranks."""
    from matplotlib import pyplot

    tensors = tensors_of("resnet50")
    all_machines = machines(machine)
    figure, axes = pyplot.subplots(1, len(all_machines) + 1, figsize=(17, 4))
    for axis, (link, costs) in zip(axes, all_machines.items(), strict=False):
        for name in ALGORITHMS:
            points = [
                (job.ranks, 1e3 * exchange_seconds(job, costs)[name]) for job in jobs(tensors)
            ]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set_title(f"exchange, {TITLES['resnet50']}, {link}", fontsize=9)
    draw_iterations(axes[-1], machine, tensors)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(f"ranks, {PER_HOST} on each host")
        axis.set_ylabel("ms")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


#: Seconds of a rank's own work in an iteration whose exchange at 1 Gbit/s takes about as long.
BALANCED = Compute(forward=0.55, backward=1.1)


def draw_iterations(axis: Any, machine: Counts, tensors: tuple[float, ...]) -> None:
    """Draw whole iterations in which computation and communication take about as long."""
    found: dict[str, list[tuple[int, float]]] = {}
    for job in jobs(tensors):
        exchange = min(exchange_seconds(job, machine).values())
        halved = cost_model.half(cost_model.two_dimensional, job).seconds(machine)
        last = exchange * cost_model.BUCKET / job.n_bytes
        times = {
            "exchange after backward": cost_model.plain(BALANCED, exchange),
            "overlap": cost_model.overlapped(BALANCED, exchange, last),
            "overlap, float16": cost_model.overlapped(BALANCED, halved, last / 2),
            "double buffering": cost_model.double_buffered(BALANCED, exchange),
        }
        for name, seconds in times.items():
            found.setdefault(name, []).append((job.ranks, 1e3 * seconds))
    for name, points in found.items():
        axis.plot(*zip(*points, strict=True), marker=".", label=name)
    axis.set_title(f"iterations, {TITLES['resnet50']}, {MEASURED_LINK}", fontsize=9)
