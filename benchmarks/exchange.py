"""The exchange of gradients alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness import (
    ONE_THREAD,
    THE_ORIGINAL,
    Contestant,
    Place,
    Team,
    emulated_hosts,
    running,
    take_turns,
)
from benchmarks.link import link_seconds
from benchmarks.networks import GRADIENT_BYTES, TITLES
from benchmarks.peers import why_no_torch
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "The exchange of gradients alone"
INTRODUCTION = """\
How long it takes until every rank has the mean of all ranks' gradients, which lie in as many
arrays as the network has parameters. All contestants are kept alive and measured in turn; medians
of the turns, and medians of the ratios inside a round. PyTorch: all-reduces by gloo of buckets as
DistributedDataParallel makes them, without the copies into them. The original has no other
communicator than `naive` that runs without a GPU, and no float16. On one host the reference is two
copies of the bytes, from memory to memory. An exchange in chunks that stay in the cache may take
less."""

ORIGINAL, DEFAULT = "original naive", "ours default"
COMMUNICATORS = ("naive", "flat", "hierarchical", "two_dimensional", "single_node")
DTYPES = ("float16", "bfloat16")
NETWORKS = ("mlp", "resnet50")


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    groups, skipped = [], []
    for network in NETWORKS:
        for size in (1, 2):
            title = f"{size} {'rank' if size == 1 else 'ranks'}, one host"
            groups += measure_at(Place(title, (size,)), network, settings)
    with emulated_hosts(2, "1gbit") as cluster:
        if isinstance(cluster, str):
            skipped.append(f"two hosts at 1 Gbit/s: {cluster}")
        else:
            place = Place("2 ranks, two hosts, 1 Gbit/s", (1, 1), cluster)
            for network in NETWORKS:
                groups += measure_at(place, network, settings)
    return groups, [*skipped, *why_no_torch()]


def measure_at(place: Place, network: str, settings: Settings) -> list[Group]:
    """Measure all contestants with the gradients of one network."""
    n_bytes = GRADIENT_BYTES[network]
    title = f"{TITLES[network]}, {n_bytes / 1e6:.1f} MB; {place.title}"
    if not settings.wants(title):
        return []
    with running(teams(place)) as started:
        rows = take_turns(
            started,
            [c for c in contestants(network) if c.team in started],
            rounds=settings.rounds,
            seconds=settings.seconds(0.2),
            tell=settings.teller(title),
        )
    group = Group(title, {"network": network, "place": place.title}, rows, ORIGINAL)
    if place.cluster is not None:
        group.reference = link_seconds(n_bytes, place.size)
        group.reference_is = (
            "what the link takes for the bytes in float32; float16 has half of them"
        )
    elif place.size > 1:
        group.reference = 2 * group.row("memcpy").median
        group.reference_is = "two copies of the bytes inside each rank"
    return [group]


def teams(place: Place) -> dict[str, Callable[[], Team]]:
    """Return what starts the jobs that are compared."""
    found = {
        "ours": lambda: Team(place, "with_chainer"),
        "original": lambda: Team(place, "with_chainer", env={**THE_ORIGINAL, **ONE_THREAD}),
    }
    if place.size > 1:
        found["mpi"] = lambda: Team(place, "with_mpi")
        if not why_no_torch():
            found["torch"] = lambda: Team(place, "with_torch", env=ONE_THREAD)
    return found


def contestants(network: str) -> Sequence[Contestant]:
    """Return all that take part."""
    default = {"what": "exchange", "network": network, "communicator": None}
    ours = [Contestant(DEFAULT, "ours", default)]
    for name in COMMUNICATORS:
        options = {"what": "exchange", "network": network, "communicator": name}
        ours.append(Contestant(f"ours {name}", "ours", options))
        for dtype in DTYPES if name == "naive" else ():
            wire = {**options, "allreduce_grad_dtype": dtype}
            ours.append(Contestant(f"ours {name}, {dtype}", "ours", wire))
    n_bytes = GRADIENT_BYTES[network]
    naive = {"what": "exchange", "network": network, "communicator": "naive"}
    return [
        *ours,
        Contestant(ORIGINAL, "original", naive),
        Contestant("MPI_Allreduce", "mpi", {"what": "allreduce", "n_bytes": n_bytes}),
        Contestant("PyTorch gloo", "torch", {"what": "exchange", "network": network}),
        Contestant("memcpy", "mpi", {"what": "memcpy", "n_bytes": n_bytes}),
    ]
