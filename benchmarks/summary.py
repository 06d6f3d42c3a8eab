"""The targets, what was measured of each, and the table of all: ``docs/results/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import efficiency, exchange, iterations, report, watch
from benchmarks.bounds import wire_bytes
from benchmarks.harness import SENT, Measured
from benchmarks.networks import GRADIENT_BYTES, TITLES
from benchmarks.report import Group

INTRODUCTION = """\
Written by `nox -s benchmarks` from the figures in `raw`; how they are measured is said in each
part and in `benchmarks/README.md`. Two ranks on two cores. Medians; ratios are
medians of the ratios of one round, in which all contestants had their turns."""

PARTS = {
    "exchange": "the exchange of gradients alone",
    "iterations": "whole iterations",
    "efficiency": "parallel efficiency of the apps",
    "scatter": "`scatter_dataset`",
    "input": "the input pipeline of apps/imagenet",
    "startup": "start-up",
    "model": "the cost model: which communicator when",
    "watch": "what the watch over failures costs",
    "failures": "how jobs end that fail",
}
ONE_HOST, TWO_HOSTS = "2 ranks, one host", "2 ranks, two hosts, 1 Gbit/s"


@dataclass(frozen=True)
class Target:
    """What was aimed at, and what was measured.

    Attributes
    ----------
    subject : str
        The part that measured it.
    text : str
        What is measured, and how large it may be at most, or has to be at least.
    value : float
    limit : float
    at_least : bool
        Whether more is better.
    """

    subject: str
    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Return whether it is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


Groups = list[Group]


def find(groups: Groups, **key: str) -> Group | None:
    """Return the group of this key, if it has been measured."""
    for group in groups:
        if all(group.key.get(name) == value for name, value in key.items()):
            return group
    return None


def targets_of_exchange(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the exchange alone."""
    for network in exchange.NETWORKS:
        group = find(groups, network=network, place=ONE_HOST)
        if group is None:
            continue
        size = f"one host, {GRADIENT_BYTES[network] / 1e6:.1f} MB"
        ours, default = group.ratio("ours naive"), group.ratio("ours default")
        fastest = min((row for row in ours_of(group)), key=lambda row: row.median, default=None)
        gloo = group.ratio("PyTorch gloo", "ours default")
        text = f"exchange, {size}"
        if default is not None:
            yield Target("exchange", f"{text}: ours / original naive", default, 0.5)
        elif ours is not None:
            yield Target("exchange", f"{text}: ours / original naive", ours, 0.5)
        if gloo is not None:
            yield Target("exchange", f"{text}: PyTorch gloo / ours", gloo, 5, True)
        if default is not None and fastest is not None:
            of_fastest = group.ratio("ours default", fastest.name) or 1.0
            yield Target(
                "exchange", f"{text}: the default / the fastest ({fastest.name})", of_fastest, 1.05
            )


def ours_of(group: Group) -> list[Measured]:
    """Return our communicators, in the dtype of the gradients."""
    return [
        row
        for row in group.rows
        if row.name.startswith("ours ") and "," not in row.name and row.seconds
    ]


def targets_of_iterations(groups: Groups) -> Iterator[Target]:
    """Yield the targets of whole iterations."""
    group = find(groups, network="conv", place=TWO_HOSTS)
    if group is not None:
        text = "iteration, conv net, 1 Gbit/s"
        ours = group.row("ours")
        assert group.bound is not None
        yield Target(
            "iterations",
            f"{text}: ours / (forward + max(backward, link))",
            ours.median / group.bound,
            1.1,
        )
        yield from faster(group, f"{text}: original / ours", "ours", 1.4)
        yield from faster(group, f"{text}: original / ours, float16", "ours, float16", 1.6)
        for name, item in (("ours", 1.0), ("ours, float16", 0.5)):
            sent = group.row(name).more.get(SENT)
            if sent is not None:
                least = wire_bytes(item * GRADIENT_BYTES["conv"], 2) / 1e6
                on_wire = f"{text}: bytes on the wire / bound, {name}"
                yield Target("iterations", on_wire, sent / least, 1.02)
    group = find(groups, network="mlp", place=TWO_HOSTS)
    if group is not None:
        text = "iteration, MLP, 1 Gbit/s: original / ours, float16"
        yield from faster(group, text, "ours, float16", 1.7)


def faster(group: Group, text: str, name: str, times: float) -> Iterator[Target]:
    """Yield the target of being so many times faster than the original."""
    ratio = group.ratio(iterations.ORIGINAL, name)
    if ratio is not None:
        yield Target("iterations", text, ratio, times, True)


def targets_of_efficiency(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the apps."""
    for group in groups:
        ratio = group.ratio(efficiency.ONE, efficiency.TWO)
        if ratio is not None:
            text = f"parallel efficiency, apps/{group.key['app']}, 2 ranks on 2 cores"
            yield Target("efficiency", text, ratio, 0.95, True)


def targets_of_scatter(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the scattering of data sets."""
    for group in groups:
        ratio = group.ratio("ours")
        if ratio is not None:
            text = f"scatter of {group.key['data']}: ours / original, time"
            yield Target("scatter", text, ratio, 0.5)
        if "memory_bound" in group.key:
            most = group.row("ours").more["MB at most"]
            limit = float(group.key["memory_bound"])
            text = "scatter of arrays: growth of a receiving rank at most / (shard + chunk)"
            yield Target("scatter", text, most / limit, 1)


def targets_of_startup(groups: Groups) -> Iterator[Target]:
    """Yield the targets of start-up."""
    added = [
        ("one process", "import chainer, chainermn", "import chainer, chainermn / import chainer"),
        (
            "mpiexec -n 2",
            "import chainer, chainermn; create_communicator",
            "2 ranks: chainer, chainermn, create_communicator / chainer, MPI",
        ),
    ]
    for start, name, text in added:
        group = find(groups, start=start)
        ratio = group.ratio(name) if group else None
        if ratio is not None:
            yield Target("startup", f"start-up, {text}", ratio, 1.1)


def targets_of_watch(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the watch: that nothing can be measured of it."""
    for group in groups:
        ratio = group.ratio(watch.ON)
        if ratio is not None:
            yield Target("watch", f"watched / not watched, {group.title}", ratio, 1.01)


TARGETS: dict[str, Callable[[Groups], Iterator[Target]]] = {
    "exchange": targets_of_exchange,
    "iterations": targets_of_iterations,
    "efficiency": targets_of_efficiency,
    "scatter": targets_of_scatter,
    "startup": targets_of_startup,
    "watch": targets_of_watch,
}


def write() -> None:
    """Write ``docs/results/README.md`` from all that has been saved."""
    saved = {part: report.load(part) for part in PARTS}
    lines = ["# Results", "", INTRODUCTION, "", *list_parts(saved), ""]
    lines += ["## Ours, the original, PyTorch, the bound", "", *compare(saved), ""]
    lines += ["## Targets", "", *tabulate_targets(saved), ""]
    path = report.RESULTS / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")


Saved = dict[str, dict[str, dict[str, Any]]]


def list_parts(saved: Saved) -> list[str]:
    """Return a table of the parts: with which MPI and when they were measured."""
    lines = ["| part | measured |", "| --- | --- |"]
    for part, text in PARTS.items():
        when = [
            f"{content['about']['date']} with {report.NAMES[mpi]}"
            for mpi, content in saved[part].items()
        ]
        measured = "; ".join(when) or "not yet"
        lines.append(f"| [{text}]({part}.md) | {measured} |" if when else f"| {text} | not yet |")
    return lines


#: Of each part: ours, the original, PyTorch, and how ours are called in the table.
COLUMNS = {
    "exchange": [
        ("ours default", "", exchange.ORIGINAL, "PyTorch gloo"),
        ("ours naive, float16", ", float16", exchange.ORIGINAL, "PyTorch gloo"),
    ],
    "iterations": [
        ("ours", "", iterations.ORIGINAL, "PyTorch DDP"),
        ("ours, float16", ", float16", iterations.ORIGINAL, "PyTorch DDP"),
        ("ours, double buffering", ", double buffering", iterations.ORIGINAL, "PyTorch DDP"),
    ],
}


def compare(saved: Saved) -> list[str]:
    """Return the table of medians in milliseconds: ours, original, PyTorch, bound."""
    heads = ["ms", "MPI", "ours", "original", "PyTorch", "bound"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for part, columns in COLUMNS.items():
        for mpi, content in saved[part].items():
            for group in content["groups"]:
                if group.bound is None:
                    continue
                for ours, suffix, original, peer in columns:
                    if not group.row(ours).seconds:
                        continue
                    medians = [median_of(group, name) for name in (ours, original, peer)]
                    network = TITLES[group.key["network"]]
                    what = f"{part}, {network}, {group.key['place']}{suffix}"
                    bound = "" if "float16" in suffix else report.milliseconds(group.bound)
                    cells = [what, report.NAMES[mpi], *medians, bound]
                    lines.append(f"| {' | '.join(cells)} |")
    return lines


def median_of(group: Group, name: str) -> str:
    """Return a median in milliseconds; nothing if it was not measured."""
    row = group.row(name)
    return report.milliseconds(row.median) if row.seconds else "-"


def tabulate_targets(saved: Saved) -> list[str]:
    """Return the table of targets."""
    heads = ["target", "MPI", "aimed at", "measured", "met"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | --- |"]
    for part, find_targets in TARGETS.items():
        for mpi, content in saved[part].items():
            for target in find_targets(content["groups"]):
                limit = f"{'≥' if target.at_least else '≤'} {target.limit:g}"
                met = "yes" if target.met else "**no**"
                cells = [target.text, report.NAMES[mpi], limit, f"{target.value:.3f}", met]
                lines.append(f"| {' | '.join(cells)} |")
    return lines
