"""Whole iterations over slow links, with everything that sends less, or less often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks import plots
from benchmarks.figures import Group, find, load
from benchmarks.harness import Contestant, Place, Settings, places, take_turns, why_no_torch
from benchmarks.networks import BATCHES, GRADIENT_BYTES, TITLES, link_seconds

NO_EXCHANGE = "ours, no exchange"
#: Name of the rate for ``tc``, bits per second, and seconds of latency each way.
LINKS = {
    f"{rate}, {latency} ms": (name, bits, latency / 1e3)
    for rate, name, bits in (("1 Gbit/s", "1gbit", 1e9), ("100 Mbit/s", "100mbit", 1e8))
    for latency in (0.2, 2)
}
HOSTS = {"2 ranks, two hosts": (1, 1), "4 ranks, four hosts": (1, 1, 1, 1)}
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "PowerSGD, rank 2": {"kind": "PowerSGD", "rank": 2},
    "PowerSGD, rank 4": {"kind": "PowerSGD", "rank": 4},
    "TopK, 1 %": {"kind": "TopK", "density": 0.01},
    "Quantization, 8 bits": {"kind": "Quantization"},
}

# In bytes, from experience.
_TOO_LITTLE = 24 << 30


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    for hosts, ranks in HOSTS.items():
        for link, (rate, bits, latency) in LINKS.items():
            wanted = [
                network for network in BATCHES if settings.wants(title_of(network, hosts, link))
            ]
            where = {f"{hosts}, {link}": ranks} if wanted else {}
            for place in places(where, rate, latency):
                if isinstance(place, str):
                    yield place
                    return
                for network in wanted:
                    title = title_of(network, hosts, link)
                    if reason := why_not(network, place):
                        yield f"{title}: {reason}"
                    else:
                        yield measure_at(place, network, title, bits, settings)
    yield from why_no_torch()


def why_not(network: str, place: Place) -> str:
    """Return why this machine cannot measure all contestants together; empty if it can."""
    if network == "resnet50" and place.size > 2 and psutil.virtual_memory().total < _TOO_LITTLE:
        return f"{_TOO_LITTLE >> 30} GiB of memory are not enough for all contestants"
    return ""


def title_of(network: str, hosts: str, link: str) -> str:
    """Return the title of a group."""
    return f"{TITLES[network]}, batch {BATCHES[network]}; {hosts}, {link}"


def measure_at(place: Place, network: str, title: str, bits: float, settings: Settings) -> Group:
    """Measure all contestants with one network, over links of ``bits`` per second."""
    rows = take_turns(
        place,
        contestants(network),
        settings,
        seconds=0.3 if network == "mlp" else 1,
    )
    about = {"network": network, "place": place.title}
    group = Group(title, about, rows, NO_EXCHANGE)
    group.reference = 1e9 / bits * link_seconds(GRADIENT_BYTES[network], len(place.ranks))
    group.reference_is = "the link in float32, without any computation"
    return group


def contestants(network: str) -> list[Contestant]:
    """Return all contestants."""
    common: dict[str, Any] = {"network": network, "batchsize": BATCHES[network]}

    def chainer(name: str, communicator: str = "naive", **options: Any) -> Contestant:
        iteration = {"what": "iteration", "communicator": communicator, **common, **options}
        return Contestant(name, "ours", iteration)

    def torch(name: str, **options: Any) -> Contestant:
        return Contestant(name, "torch", {"what": "iteration", **common, **options})

    compressed = [
        chainer(f"ours, {name}", overlap=False, compression=compression)
        for name, compression in COMPRESSIONS.items()
    ]
    overlapped = [
        chainer(f"ours, {name}, overlap", overlap=True, compression=COMPRESSIONS[name])
        for name in ("PowerSGD, rank 2", "PowerSGD, rank 4")
    ]
    return [
        chainer(NO_EXCHANGE, "dummy", overlap=False),
        chainer("ours, overlap on", overlap=True),
        chainer("ours, bfloat16", overlap=True, dtype="bfloat16"),
        *compressed,
        *overlapped,
        chainer("ours, accumulate 8", overlap=False, accumulate=8),
        chainer("ours, LocalSGD, period 8", local={"period": 8}),
        Contestant("original naive", "original", {**chainer("").options}),
        torch("PyTorch, no exchange", alone=True),
        torch("PyTorch DDP"),
        torch("PyTorch DDP, fp16 hook", hook="fp16"),
        torch("PyTorch DDP, PowerSGD hook, rank 4", hook="power_sgd"),
    ]


def draw() -> None:
    """Draw iterations with each setting on two hosts, and on four."""
    rows = {
        "no exchange": NO_EXCHANGE,
        "float32": "ours, overlap on",
        "bfloat16": "ours, bfloat16",
        "Quantization()": "ours, Quantization, 8 bits",
        "TopK(0.01)": "ours, TopK, 1 %",
        "PowerSGD(rank=4)": "ours, PowerSGD, rank 4",
        "accumulate=8": "ours, accumulate 8",
        "LocalSGD(8)": "ours, LocalSGD, period 8",
        "PyTorch DDP": "PyTorch DDP",
        "... fp16 hook": "PyTorch DDP, fp16 hook",
        "... PowerSGD hook": "PyTorch DDP, PowerSGD hook, rank 4",
    }
    drawn = {"slow": ("resnet50", "two hosts"), "slow_four_hosts": ("conv", "four hosts")}
    for name, (network, number) in drawn.items():
        hosts = next(title for title in HOSTS if number in title)
        panels: list[plots.Panel] = []
        for content in load("slow").values():
            for link in LINKS:
                if "0.2 ms" in link:
                    group = find(content, network=network, place=f"{hosts}, {link}")
                    title = f"{TITLES[network]}, {number}, {link.partition(',')[0]}"
                    panels += plots.panel(
                        title, plots.times(group, rows, {"no exchange": NO_EXCHANGE})
                    )
        caption = "ms per iteration; less is better\nEach panel has its own scale."
        plots.draw(name, panels, caption, one_scale=False)
