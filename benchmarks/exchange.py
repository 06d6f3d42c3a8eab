"""The exchange of gradients alone."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import plots
from benchmarks.figures import Group, find, load
from benchmarks.harness import Contestant, Place, Settings, places, take_turns, why_no_torch
from benchmarks.networks import GRADIENT_BYTES, TITLES, link_seconds
from chainermn.communicators import registered
from chainermn.launch.mpiexec import NAMES

ORIGINAL = "original naive"
DTYPES = ("float16", "bfloat16")
PLACES = {
    "1 rank, one host": (1,),
    "2 ranks, one host": (2,),
    "2 ranks, two hosts, 1 Gbit/s": (1, 1),
    "4 ranks, two hosts, 1 Gbit/s": (2, 2),
}
# `dummy` does not exchange, `pure_nccl` needs GPUs, `non_cuda_aware` differs on GPUs only.
COMMUNICATORS = sorted(registered().keys() - {"dummy", "pure_nccl", "non_cuda_aware"})


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    for place in places(PLACES):
        if isinstance(place, str):
            yield place
            continue
        for network in ("mlp", "resnet50") if place.size < 4 else ("conv",):
            title = f"{TITLES[network]}, {GRADIENT_BYTES[network] / 1e6:.1f} MB; {place.title}"
            if settings.wants(title):
                yield measure_at(place, network, title, settings)
    yield from why_no_torch()


def measure_at(place: Place, network: str, title: str, settings: Settings) -> Group:
    """Measure all contestants with the gradients of one network."""
    rows = take_turns(place, contestants(place, network), settings, seconds=0.2)
    group = Group(title, {"network": network, "place": place.title}, rows, ORIGINAL)
    if place.cluster is not None:
        group.reference = link_seconds(GRADIENT_BYTES[network], len(place.ranks))
        group.reference_is = "the bytes in float32 on the link"
    elif place.size > 1:
        group.reference = 2 * group.row("memcpy").median
        group.reference_is = "two copies of the bytes inside each rank"
    return group


def contestants(place: Place, network: str) -> list[Contestant]:
    """Return all contestants."""

    def exchange(name: str, team: str, communicator: str | None, **settings: str) -> Contestant:
        options = {"what": "exchange", "network": network, "communicator": communicator}
        return Contestant(name, team, {**options, **settings})

    found = [exchange("ours default", "ours", None)]
    for name in COMMUNICATORS:
        found.append(exchange(f"ours {name}", "ours", name))
    if place.cluster is not None:
        for dtype in DTYPES:
            named = f"ours naive, {dtype}"
            found.append(exchange(named, "ours", "naive", allreduce_grad_dtype=dtype))
    found.append(exchange(ORIGINAL, "original", "naive"))
    if place.size > 1:
        n_bytes = GRADIENT_BYTES[network]
        found += [
            Contestant("MPI_Allreduce", "mpi", {"what": "allreduce", "n_bytes": n_bytes}),
            Contestant("PyTorch gloo", "torch", {"what": "exchange", "network": network}),
            Contestant("memcpy", "mpi", {"what": "memcpy", "n_bytes": n_bytes}),
        ]
    return found


def draw() -> None:
    """Draw how long each takes for the gradients of ResNet-50, on one host and on two."""
    both = {
        "ChainerMN": "ours default",
        "original ChainerMN": ORIGINAL,
        "PyTorch gloo": "PyTorch gloo",
        "MPI_Allreduce": "MPI_Allreduce",
    }
    in_16_bits = {"ChainerMN, bfloat16": "ours naive, bfloat16"}
    _draw("exchange", "2 ranks, one host", both, "dashed: two copies of the bytes in memory")
    place = "2 ranks, two hosts, 1 Gbit/s"
    _draw(
        "exchange_two_hosts", place, in_16_bits | both, "dashed: the link at full speed in float32"
    )


def _draw(name: str, place: str, rows: dict[str, str], dashed: str) -> None:
    panels: list[plots.Panel] = []
    for mpi, content in load("exchange").items():
        group = find(content, network="resnet50", place=place)
        panels += plots.panel(
            f"ResNet-50, {NAMES[mpi]}", plots.times(group, rows), group.reference
        )
    plots.draw(name, panels, f"ms for all gradients; less is better\n{dashed}")
