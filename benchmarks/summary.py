"""The targets, what was measured of each, and the table of all: ``docs/results/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import efficiency, exchange, iterations, report, watch
from benchmarks.harness import SENT, Measured
from benchmarks.link import link_seconds, wire_bytes
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
    limited_by : str
        What keeps it from being better, in figures.
    """

    subject: str
    text: str
    value: float
    limit: float
    at_least: bool = False
    limited_by: str = ""

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
        default = group.ratio("ours default")
        fastest = min(others_of(group), key=lambda row: row.median, default=None)
        gloo = group.ratio("PyTorch gloo", "ours default")
        text = f"exchange, {size}"
        limits = limits_of_exchange(group)
        if default is not None:
            yield Target(
                "exchange", f"{text}: ours / original naive", default, 0.5, limited_by=limits
            )
        if gloo is not None:
            yield Target("exchange", f"{text}: PyTorch gloo / ours", gloo, 5, True, limits)
        if default is not None and fastest is not None:
            of_fastest = group.ratio("ours default", fastest.name) or 1.0
            itself = median_of(group, "ours single_node")
            yield Target(
                "exchange",
                f"{text}: the default / the fastest other ({fastest.name})",
                of_fastest,
                1.05,
                limited_by=f"the default is single_node, which by its own name took {itself} ms "
                f"in the same run, and {fastest.name} {median_of(group, fastest.name)} ms",
            )


def limits_of_exchange(group: Group) -> str:
    """Return what ours compares with: the copies that it consists of, and MPI's own."""
    ours, copy = median_of(group, "ours default"), median_of(group, "memcpy")
    return (
        f"a rank has to read all its gradients and to write all means, at least a copy of the "
        f"bytes: {copy} ms, {group.ratio('memcpy') or 0:.2f} of the original's time; beyond that "
        f"the others' part has to come from their caches or from memory. MPI's all-reduce of one "
        f"array takes {median_of(group, 'MPI_Allreduce')} ms, ours {ours} ms"
    )


def others_of(group: Group) -> list[Measured]:
    """Return our communicators that are not the default, in the dtype of the gradients."""
    default = (exchange.DEFAULT, "ours single_node")  # on one host these are the same
    return [
        row
        for row in group.rows
        if row.name.startswith("ours ") and "," not in row.name and row.seconds
        if row.name not in default
    ]


def targets_of_iterations(groups: Groups) -> Iterator[Target]:
    """Yield the targets of whole iterations."""
    group = find(groups, network="conv", place=TWO_HOSTS)
    if group is not None:
        text = "iteration, conv net, 1 Gbit/s"
        ours = group.row("ours")
        assert group.reference is not None
        limits = limits_of_iterations(group)
        yield Target(
            "iterations",
            f"{text}: ours / (forward + max(backward, link))",
            ours.median / group.reference,
            1.1,
            limited_by=limits,
        )
        yield from faster(group, f"{text}: original / ours", "ours", 1.4, limits)
        yield from faster(group, f"{text}: original / ours, float16", "ours, float16", 1.6, limits)
        for name, item in (("ours", 1.0), ("ours, float16", 0.5)):
            sent = group.row(name).more.get(SENT)
            if sent is not None:
                least = wire_bytes(item * GRADIENT_BYTES["conv"], 2) / 1e6
                on_wire = f"{text}: bytes on the wire / least, {name}"
                yield Target("iterations", on_wire, sent / least, 1.02)
    group = find(groups, network="mlp", place=TWO_HOSTS)
    if group is not None:
        text = "iteration, MLP, 1 Gbit/s: original / ours, float16"
        limits = (
            f"an iteration without an exchange takes {median_of(group, 'ours, no exchange')} ms "
            f"here, and the link {link_seconds(GRADIENT_BYTES['mlp'], 2) / 2 * 1e3:.1f} ms for "
            "half the bytes; hardly any of that hides behind backward, since the gradients of the "
            "first two layers, which are nearly all, are final at its end"
        )
        yield from faster(group, text, "ours, float16", 1.7, limits)


def limits_of_iterations(group: Group) -> str:
    """Return what of the exchange is hidden, and what could be."""
    link = link_seconds(GRADIENT_BYTES["conv"], 2) * 1e3
    on, off = (median_of(group, f"ours, overlap {setting}") for setting in ("on", "off"))
    return (
        f"with overlap=True {on} ms, without {off} ms; an iteration without an exchange takes "
        f"{median_of(group, 'ours, no exchange')} ms, the link {link:.0f} ms"
    )


def faster(
    group: Group, text: str, name: str, times: float, limited_by: str = ""
) -> Iterator[Target]:
    """Yield the target of being so many times faster than the original."""
    ratio = group.ratio(iterations.ORIGINAL, name)
    if ratio is not None:
        yield Target("iterations", text, ratio, times, True, limited_by)


def targets_of_efficiency(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the apps."""
    for group in groups:
        ratio = group.ratio(efficiency.ONE, efficiency.TWO)
        if ratio is not None:
            text = f"parallel efficiency, apps/{group.key['app']}, 2 ranks on 2 cores"
            yield Target("efficiency", text, ratio, 0.95, True, limits_of_efficiency(group))


def limits_of_efficiency(group: Group) -> str:
    """Return what of the loss is not the exchange's."""
    beside = group.ratio(efficiency.ONE, efficiency.BOTH)
    if beside is None:
        return ""
    added = group.row(efficiency.TWO).median - group.row(efficiency.BOTH).median
    limits = f"two single ranks at the same time, which exchange nothing, have {beside:.2f}"
    if added <= 0:
        return f"{limits}, and take no less time"
    return (
        f"{limits}; the exchange, and waiting for the slower rank of the two, add "
        f"{added * 1e3:.2f} ms to their {median_of(group, efficiency.BOTH)} ms"
    )


def targets_of_scatter(groups: Groups) -> Iterator[Target]:
    """Yield the targets of the scattering of data sets."""
    for group in groups:
        ratio = group.ratio("ours")
        if ratio is not None and group.key["data"] == "arrays":
            yield Target("scatter", "scatter of arrays: ours / original, time", ratio, 0.5)
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
        if group is not None and ratio is not None:
            more = (group.row(name).median - group.row(group.baseline).median) * 1e3
            limits = f"{more:.0f} ms are added"
            if start == "mpiexec -n 2":
                limits += ", by imports and by the processes that begin to watch over the ranks"
            yield Target("startup", f"start-up, {text}", ratio, 1.1, limited_by=limits)


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
    lines += ["## Ours, the original, PyTorch, the reference", "", *compare(saved), ""]
    lines += ["## Targets", "", *tabulate_targets(saved), ""]
    lines += ["## What limits those that are not met", "", *list_limits(saved), ""]
    path = report.RESULTS / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


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
    """Return the table of medians in milliseconds: ours, original, PyTorch, reference."""
    heads = ["ms", "MPI", "ours", "original", "PyTorch", "reference"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for part, columns in COLUMNS.items():
        for mpi, content in saved[part].items():
            for group in content["groups"]:
                if group.reference is None:
                    continue
                for ours, suffix, original, peer in columns:
                    if not group.row(ours).seconds:
                        continue
                    medians = [median_of(group, name) for name in (ours, original, peer)]
                    network = TITLES[group.key["network"]]
                    what = f"{part}, {network}, {group.key['place']}{suffix}"
                    reference = "" if "float16" in suffix else report.milliseconds(group.reference)
                    cells = [what, report.NAMES[mpi], *medians, reference]
                    lines.append(f"| {' | '.join(cells)} |")
    return lines


def median_of(group: Group, name: str) -> str:
    """Return a median in milliseconds; nothing if it was not measured."""
    row = group.row(name)
    return report.milliseconds(row.median) if row.seconds else "-"


def all_targets(saved: Saved) -> Iterator[tuple[str, Target]]:
    """Yield every target that was measured, with the name of the MPI."""
    for part, find_targets in TARGETS.items():
        for mpi, content in saved[part].items():
            for target in find_targets(content["groups"]):
                yield report.NAMES[mpi], target


def tabulate_targets(saved: Saved) -> list[str]:
    """Return the table of targets."""
    heads = ["target", "MPI", "aimed at", "measured", "met"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | --- |"]
    for mpi, target in all_targets(saved):
        limit = f"{'≥' if target.at_least else '≤'} {target.limit:g}"
        met = "yes" if target.met else "**no**"
        cells = [target.text, mpi, limit, f"{target.value:.3f}", met]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def list_limits(saved: Saved) -> list[str]:
    """Return what keeps each target that is not met from being so."""
    return [
        f"- **{target.text}** ({mpi}): {target.limited_by}."
        for mpi, target in all_targets(saved)
        if not target.met and target.limited_by
    ] or ["All are met."]
