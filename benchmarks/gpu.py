"""On GPUs: the exchange of gradients, and whole iterations."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns, why_no_torch
from benchmarks.networks import GRADIENT_BYTES, TITLES
from chainermn.communicators import registered

TITLE = "On GPUs"
BATCHES = {"mlp": 100, "resnet50": 32}
COMMUNICATORS = sorted(registered().keys() - {"dummy"})


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups, and what could not be measured and why."""
    from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl
    from chainermn.transport.gpu.device import the_gpu

    if reason := why_no_gpu() or why_no_nccl():
        yield f"anything on a GPU: {reason}"
        return
    gpus = len(the_gpu().devices())
    place = Place(f"one rank on each of {gpus} GPUs", (gpus,))
    for network in BATCHES:
        for what, contestants in (("exchange", exchanges), ("iteration", iterations)):
            title = f"{what}, {TITLES[network]}, {GRADIENT_BYTES[network] / 1e6:.1f} MB"
            title = f"{title}; {place.title}"
            if settings.wants(title):
                key = {"network": network, "what": what}
                found = contestants(network)
                rows = take_turns(place, found, settings, seconds=0.5)
                yield Group(title, key, rows, found[0].name)
    yield from why_no_torch()


def exchanges(network: str) -> list[Contestant]:
    """Return all that exchange the gradients of a network."""
    options: dict[str, Any] = {"what": "exchange", "network": network, "on_gpu": True}
    return [
        Contestant("ours default", "ours", {**options, "communicator": None}),
        *(
            Contestant(f"ours {name}", "ours", {**options, "communicator": name})
            for name in COMMUNICATORS
        ),
        Contestant("PyTorch NCCL", "torch", options),
    ]


def iterations(network: str) -> list[Contestant]:
    """Return all that train a network."""
    options = {"what": "iteration", "network": network, "batchsize": BATCHES[network]}
    options["on_gpu"] = True
    ours = {**options, "communicator": None}
    found = [
        Contestant("ours", "ours", ours),
        Contestant("ours, overlap on", "ours", {**ours, "overlap": True}),
        Contestant("ours, no exchange", "ours", {**ours, "communicator": "dummy"}),
        Contestant("PyTorch DDP", "torch", options),
        Contestant("PyTorch, no exchange", "torch", {**options, "alone": True}),
    ]
    if importlib.util.find_spec("cudnn") is not None:
        found.append(Contestant("ours, with cuDNN", "with cuDNN", ours))
    return found
