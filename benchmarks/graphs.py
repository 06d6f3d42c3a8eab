"""Training steps as CUDA graphs, beside PyTorch's ways to run a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures import Group, Measured
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import MIXED, SINGLE, TITLES

#: Networks, batch sizes and precisions.
CASES = (
    ("mlp", 100, SINGLE),
    ("conv", 64, SINGLE),
    ("conv", 64, MIXED),
    ("resnet50", 64, MIXED),
    ("resnet50", 256, MIXED),
)
_SECONDS = 0.4


def measure(settings: Settings, *, has_cudnn: bool) -> Iterator[Group]:
    """Yield the times of whole iterations on one GPU, without an exchange."""
    place = Place("one GPU", (1,))
    for network, batch, precision in CASES:
        title = f"graphs, {TITLES[network]}, {precision}, batch {batch}; {place.title}"
        if not settings.wants(title):
            continue
        options = {"network": network, "batchsize": batch, "mixed": precision == MIXED}
        found = [*ours(options, has_cudnn=has_cudnn), *pytorch(options)]
        rows = take_turns(place, found, settings, seconds=_SECONDS)
        key = {"network": network, "what": "graphs"}
        key |= {"precision": precision, "batch": str(batch)}
        notes = [
            "The first steps include compiling kernels, and with graphs also recording a step and "
            "comparing it with eager ones.",
        ]
        yield Group(title, key, rows, fastest_of(rows, "PyTorch"), notes=notes)


def ours(options: dict[str, Any], *, has_cudnn: bool) -> list[Contestant]:
    """Return iterations of Chainer, each kind in a process of its own."""
    team = "with cuDNN" if has_cudnn else "ours"
    name = "ours, with cuDNN" if has_cudnn else "ours"
    is_for_tensor_cores = has_cudnn and options["mixed"] and options["network"] != "mlp"
    layouts = ("", ", channels last")[: 1 + is_for_tensor_cores]
    options = {"what": "iteration", **options, "on_gpu": True, "communicator": None}
    return [
        Contestant(name + suffix, team + suffix, {**options, "graphs": suffix.endswith("graphs")})
        for suffix in (layout + launches for layout in layouts for launches in ("", ", graphs"))
    ]


def pytorch(options: dict[str, Any]) -> list[Contestant]:
    """Return PyTorch's iterations: eager, as a graph, and compiled for the best layout."""
    alone = {"what": "iteration", "on_gpu": True, "alone": True}
    found = []
    for is_last in [False, True][: 1 + (options["network"] != "mlp")]:
        name = "PyTorch, channels last" if is_last else "PyTorch"
        step = {**options, "channels_last": is_last}
        found.append(Contestant(name, "torch", {**step, **alone}))
        found.append(Contestant(f"{name}, CUDA graph", "torch, graphs", {**step, "what": "graph"}))
    compiled = {**step, "what": "compiled"}
    return [*found, Contestant(f"{name}, compiled", "torch, graphs", compiled)]


def fastest_of(rows: Sequence[Measured], prefix: str) -> str:
    """Return the name of the fastest row that begins so, or of the first row."""
    measured = [row for row in rows if row.name.startswith(prefix) and row.seconds]
    return min(measured, key=lambda row: row.median, default=rows[0]).name
