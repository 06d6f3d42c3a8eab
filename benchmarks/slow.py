"""Whole iterations over slow links, with all that sends less or less often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, places, take_turns, why_no_torch
from benchmarks.networks import BATCHES, GRADIENT_BYTES, TITLES, link_seconds

TITLE = "Slow networks"
NO_EXCHANGE = "ours, no exchange"
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}

COMPRESSIONS: dict[str, dict[str, Any]] = {
    "PowerSGD, rank 1": {"kind": "PowerSGD", "rank": 1},
    "PowerSGD, rank 2": {"kind": "PowerSGD", "rank": 2},
    "PowerSGD, rank 4": {"kind": "PowerSGD", "rank": 4},
    "TopK, 1 %": {"kind": "TopK", "density": 0.01},
    "TopK, 0.1 %": {"kind": "TopK", "density": 0.001},
    "Quantization, 8 bits": {"kind": "Quantization"},
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and what could not be measured and why."""
    for title, rate in RATES.items():
        for place in places({f"2 ranks, two hosts, {title}": (1, 1)}, rate=rate):
            if isinstance(place, str):
                yield place
                return
            for network, batchsize in BATCHES.items():
                name = f"{TITLES[network]}, batch {batchsize}; {place.title}"
                if settings.wants(name):
                    yield measure_at(place, network, name, rate, settings)
    yield from why_no_torch()


def measure_at(place: Place, network: str, title: str, rate: str, settings: Settings) -> Group:
    """Measure all contestants with one network."""
    rows = take_turns(
        place,
        contestants(network),
        settings,
        seconds=0.3 if network == "mlp" else 1,
        rounds=min(settings.rounds, 3),
    )
    about = {"network": network, "place": place.title}
    group = Group(title, about, rows, NO_EXCHANGE)
    slower = 1 if rate == "1gbit" else 10
    group.reference = slower * link_seconds(GRADIENT_BYTES[network], len(place.ranks))
    group.reference_is = "the link in float32, without any computation"
    return group


def contestants(network: str) -> list[Contestant]:
    """Return all that take part."""
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
    return [
        chainer(NO_EXCHANGE, "dummy", overlap=False),
        chainer("ours", overlap=True),
        chainer("ours, bfloat16", overlap=True, dtype="bfloat16"),
        *compressed,
        chainer("ours, accumulate 8", overlap=False, accumulate=8),
        chainer("ours, LocalSGD, period 8", local=8),
        chainer("ours, LocalSGD, period 8, bfloat16", local=8, dtype="bfloat16"),
        Contestant("original naive", "original", {**chainer("").options}),
        torch("PyTorch, no exchange", alone=True),
        torch("PyTorch DDP"),
        torch("PyTorch DDP, fp16 hook", hook="fp16"),
        torch("PyTorch DDP, PowerSGD hook, rank 4", hook="power_sgd"),
    ]
