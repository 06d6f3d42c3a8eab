"""The cost of comparing replicas, as a share of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures import Group
from benchmarks.harness import Contestant, Place, Settings, take_turns
from benchmarks.networks import TITLES

ITERATION, COMPARISON = "an iteration", "a comparison"

#: The app, examples in an epoch, examples in a batch of a rank, and the optimizer.
CASES = {
    "digits": ("apps/mnist", 1437, 30, "Adam"),
    "resnet50": ("apps/imagenet", 1_281_167, 2, "MomentumSGD"),
}


def measure(settings: Settings) -> Iterator[Group]:
    """Yield a group for each app."""
    place = Place("2 ranks, one host", (2,))
    for network, (app, n_examples, batchsize, rule) in CASES.items():
        title = f"{app}: {TITLES[network]}, batch {batchsize}, {rule}; {place.title}"
        if not settings.wants(title):
            continue
        options: dict[str, Any] = {"what": "iteration", "communicator": None, "rule": rule}
        options |= {"network": network, "batchsize": batchsize}
        rows = take_turns(
            place,
            [
                Contestant(ITERATION, "ours", options),
                Contestant(COMPARISON, "ours", {**options, "compares": True}),
            ],
            settings,
            seconds=1,
        )
        group = Group(title, {"network": network}, rows, ITERATION)
        n_iterations = -(-n_examples // (place.size * batchsize))
        iteration, comparison = (min(row.seconds) for row in rows)
        share = comparison / (n_iterations * iteration)
        group.notes.append(
            f"An epoch of {n_examples} examples has {n_iterations} iterations. Without evaluation "
            f"and snapshots, a comparison takes {share:.2g} of it, by the shortest turns"
        )
        yield group
