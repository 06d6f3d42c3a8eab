"""Whole iterations: forward, backward, the exchange of gradients and the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import plots
from benchmarks.figures import Group, find, load
from benchmarks.harness import Contestant, Place, Settings, places, take_turns, why_no_torch
from benchmarks.networks import BATCHES, GRADIENT_BYTES, TITLES, link_seconds

ORIGINAL, NO_EXCHANGE = "original naive", "ours, no exchange"
FORWARD, BACKWARD = "forward", "forward and backward"
PLACES = {"2 ranks, one host": (2,), "2 ranks, two hosts, 1 Gbit/s": (1, 1)}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and for anything that could not be measured, the reason."""
    for place in places(PLACES):
        if isinstance(place, str):
            yield place
            continue
        for network, batchsize in BATCHES.items():
            millions = GRADIENT_BYTES[network] / 4e6
            title = f"{TITLES[network]}, {millions:.1f} M parameters, batch {batchsize}"
            title = f"{title}; {place.title}"
            if settings.wants(title):
                yield measure_at(place, network, title, settings)
    yield from why_no_torch()


def measure_at(place: Place, network: str, title: str, settings: Settings) -> Group:
    """Measure all contestants with one network."""
    is_large = network == "resnet50"
    rows = take_turns(
        place,
        contestants(place, network),
        settings,
        seconds=0.3 if network == "mlp" else 1,
        rounds=min(settings.rounds, 3) if is_large else None,
    )
    group = Group(title, {"network": network, "place": place.title}, rows, ORIGINAL)
    forward = group.row(FORWARD).median
    backward = group.row(BACKWARD).median - forward
    group.reference, group.reference_is = forward + backward, "forward + backward"
    if place.cluster is not None:
        link = link_seconds(GRADIENT_BYTES[network], len(place.ranks))
        group.reference = forward + max(backward, link)
        parts = ", ".join(f"{1e3 * part:.0f} ms" for part in (forward, backward, link))
        group.reference_is = f"forward + max(backward, link in float32), of {parts}"
    return group


def contestants(place: Place, network: str) -> list[Contestant]:
    """Return all contestants."""
    common: dict[str, Any] = {"network": network, "batchsize": BATCHES[network]}

    def chainer(name: str, team: str, communicator: str = "naive", **options: Any) -> Contestant:
        iteration = {"what": "iteration", "communicator": communicator, **common, **options}
        return Contestant(name, team, iteration)

    torch = {"what": "iteration", **common}
    default: dict[str, Any] = {} if place.cluster is None else {"overlap": "auto"}
    found = [
        chainer("ours", "ours", **default),
        chainer("ours, overlap off", "ours", overlap=False),
        chainer("ours, overlap on", "ours", overlap=True),
        chainer("ours, double buffering", "ours", double_buffering=True),
        chainer(NO_EXCHANGE, "ours", "dummy", overlap=False),
        chainer("ours, without oneDNN", "ours, NumPy", **default),
        Contestant(FORWARD, "ours", {"what": "forward", "and_backward": False, **common}),
        Contestant(BACKWARD, "ours", {"what": "forward", "and_backward": True, **common}),
        chainer(ORIGINAL, "original"),
        Contestant("PyTorch DDP", "torch", torch),
        Contestant("PyTorch, no exchange", "torch", {**torch, "alone": True}),
    ]
    if place.cluster is not None:
        found += [
            chainer("ours, float16", "ours", dtype="float16", **default),
            chainer("ours, bfloat16", "ours", dtype="bfloat16", **default),
        ]
    elif network != "resnet50":  # which takes seconds, and behaves like the others
        alone = f"{ORIGINAL}, threads left alone"
        found.append(chainer(alone, "original, threads left alone"))
        every = "a thread for every core"
        found.append(chainer(f"ours, {every}", every))
    return found


def draw() -> None:
    """Draw what the exchange adds to the computation, and what settings change, with MPICH."""
    content = load("iterations").get("mpich")
    if content is None:
        return
    rows = {"ChainerMN": "ours", "original ChainerMN": ORIGINAL, "PyTorch DDP": "PyTorch DDP"}
    alone = dict.fromkeys(rows, NO_EXCHANGE) | {"PyTorch DDP": "PyTorch, no exchange"}
    panels: list[plots.Panel] = []
    for place, short in zip(PLACES, ("one host", "two hosts, 1 Gbit/s"), strict=True):
        for network in ("conv", "resnet50"):
            bars = plots.times(find(content, network=network, place=place), rows, alone)
            panels += plots.panel(f"{TITLES[network]}, {short}", bars)
    caption = (
        "ms per iteration; less is better\noutlined: computation; filled: what the exchange adds"
    )
    plots.draw("iterations", panels, caption)

    settings = {
        "no exchange": NO_EXCHANGE,
        "overlap=False": "ours, overlap off",
        "overlap=True": "ours, overlap on",
        "double buffering": "ours, double buffering",
        "float16": "ours, float16",
        "bfloat16": "ours, bfloat16",
    }
    panels = []
    for network in BATCHES:
        group = find(content, network=network, place=[*PLACES][-1])
        bars = plots.times(group, settings, {"no exchange": NO_EXCHANGE})
        panels += plots.panel(TITLES[network], bars)
    caption = "ms per iteration, two hosts, 1 Gbit/s; less is better"
    plots.draw("iterations_settings", panels, caption, one_scale=False)
