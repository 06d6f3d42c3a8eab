"""Whole iterations: forward, backward, the exchange of gradients, the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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

TITLE = "Whole iterations"
INTRODUCTION = """\
Forward, backward, the exchange of gradients and a step of SGD, on two ranks. All contestants are
kept alive and measured in turn; medians of the turns, and medians of the ratios inside a round.
Where nothing is said of threads, ours are as `create_communicator` sets them on one host, which
divides the cores among the ranks; the original and PyTorch have one a rank, and so has everybody
on emulated hosts, which share the two cores. PyTorch has the same networks; that its convolutions
are faster than Chainer's is not the exchange's doing, so its time without an exchange stands
beside it. Double buffering steps with the gradients of the iteration before; nothing else here is
stale. The original offers overlap, double buffering and float16 with NCCL alone, so that there is
only its `naive` to compare with. The reference is made of what ours computes, in float32:
PyTorch's rows, and those with 16 bits on the wire, may be below it."""

ORIGINAL = "original naive"
COMPUTE, FORWARD, BACKWARD = "ours, no exchange", "forward", "forward and backward"
TORCH_COMPUTE = "PyTorch, no exchange"
CROWDED = "ours, a thread for every core"
A_THREAD_FOR_EVERY_CORE = {"OMP_NUM_THREADS": str(os.cpu_count())}
BATCHES = {"mlp": 100, "conv": 8, "resnet50": 2}


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    skipped = why_no_torch()
    one_host = Place("2 ranks, one host", (2,))
    groups = [group for network in BATCHES for group in measure_at(one_host, network, settings)]
    with emulated_hosts(2, "1gbit") as cluster:
        if isinstance(cluster, str):
            skipped.append(f"two hosts at 1 Gbit/s: {cluster}")
        else:
            place = Place("2 ranks, two hosts, 1 Gbit/s", (1, 1), cluster)
            for network in BATCHES:
                groups += measure_at(place, network, settings)
    return groups, skipped


def measure_at(place: Place, network: str, settings: Settings) -> list[Group]:
    """Measure all contestants with one network."""
    n_bytes = GRADIENT_BYTES[network]
    title = f"{TITLES[network]}, {n_bytes / 4e6:.1f} M parameters, batch {BATCHES[network]}"
    title = f"{title}; {place.title}"
    if not settings.wants(title):
        return []
    large = network == "resnet50"
    with running(teams(place)) as started:
        rows = take_turns(
            started,
            [c for c in contestants(place, network) if c.team in started],
            rounds=min(settings.rounds, 3) if large else settings.rounds,
            seconds=settings.seconds(0.3 if network == "mlp" else 1),
            tell=settings.teller(title),
        )
    group = Group(title, {"network": network, "place": place.title}, rows, ORIGINAL)
    forward = group.row(FORWARD).median
    backward = group.row(BACKWARD).median - forward
    group.reference, group.reference_is = forward + backward, "forward + backward"
    if place.cluster is not None:
        link = link_seconds(n_bytes, place.size)
        group.reference = forward + max(backward, link)
        group.reference_is = (
            f"forward + max(backward, link), of {1e3 * forward:.0f} ms, {1e3 * backward:.0f} ms "
            f"and {1e3 * link:.0f} ms (float32)"
        )
    return [group]


def teams(place: Place) -> dict[str, Callable[[], Team]]:
    """Return what starts the jobs that are compared."""
    found = {
        "ours": lambda: Team(place, "with_chainer"),
        "original": lambda: Team(place, "with_chainer", env={**THE_ORIGINAL, **ONE_THREAD}),
    }
    if place.cluster is None:
        found["left alone"] = lambda: Team(place, "with_chainer", env=THE_ORIGINAL)
        found["crowded"] = lambda: Team(place, "with_chainer", env=A_THREAD_FOR_EVERY_CORE)
    if not why_no_torch():
        found["torch"] = lambda: Team(place, "with_torch", env=ONE_THREAD)
    return found


def contestants(place: Place, network: str) -> list[Contestant]:
    """Return all that take part."""
    common: dict[str, Any] = {"network": network, "batchsize": BATCHES[network]}

    def chainer(name: str, team: str, communicator: str = "naive", **options: Any) -> Contestant:
        iteration = {"what": "iteration", "communicator": communicator, **common, **options}
        return Contestant(name, team, iteration)

    found = [
        chainer("ours", "ours"),
        chainer("ours, overlap off", "ours", overlap=False),
        chainer("ours, overlap on", "ours", overlap=True),
        chainer("ours, float16", "ours", dtype="float16"),
        chainer("ours, bfloat16", "ours", dtype="bfloat16"),
        chainer("ours, double buffering", "ours", double_buffering=True),
        chainer(COMPUTE, "ours", "dummy"),
        Contestant(FORWARD, "ours", {"what": "forward", "and_backward": False, **common}),
        Contestant(BACKWARD, "ours", {"what": "forward", "and_backward": True, **common}),
        chainer(ORIGINAL, "original"),
        chainer("original naive, threads left alone", "left alone"),
        chainer(CROWDED, "crowded"),
        Contestant("PyTorch DDP", "torch", {"what": "iteration", **common}),
        Contestant(TORCH_COMPUTE, "torch", {"what": "iteration", "alone": True, **common}),
    ]
    if network == "resnet50":  # which takes seconds: the rest is the same as for the others
        few = {"ours, bfloat16", "ours, overlap on", CROWDED, "original naive, threads left alone"}
        found = [contestant for contestant in found if contestant.name not in few]
    return found
