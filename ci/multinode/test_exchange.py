"""Exchanges among several hosts give the results of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job, output_of
from ci.multinode.scripts import exchange

SCRIPT = Path(__file__).with_name("scripts") / "exchange.py"
PLACEMENTS = [(2, 2), (3, 1), (1, 1, 1)]
COMMUNICATORS = [
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "non_cuda_aware",
    "single_node",
]

Placement = tuple[int, ...]
Report = dict[str, Any]


@pytest.fixture(scope="module", params=PLACEMENTS, ids=lambda p: "+".join(map(str, p)))
def placement(request: pytest.FixtureRequest) -> Placement:
    return request.param


@pytest.fixture(scope="module")
def report(placement: Placement, start_job: Callable[..., Job]) -> Report:
    return json.loads(output_of(start_job(placement, [SCRIPT, *COMMUNICATORS]).wait()))


def test_places(placement: Placement, report: Report, hosts: Hosts) -> None:
    expected = [
        [name, intra_rank, intra_size, inter_rank, len(placement)]
        for inter_rank, (name, intra_size) in enumerate(zip(hosts.names, placement, strict=False))
        for intra_rank in range(intra_size)
    ]
    size = sum(placement)
    assert report["place"] == [[e[0], rank, size, *e[1:]] for rank, e in enumerate(expected)]


def refused(placement: Placement) -> dict[str, str]:
    """Return the communicators that refuse this placement of ranks, and why."""
    why = {"single_node": f"the {sum(placement)} ranks run on {len(placement)}"}
    if len(set(placement)) > 1:
        why["two_dimensional"] = f"got {', '.join(map(str, placement))}"
    return why


def test_refusals_on_every_rank(report: Report, placement: Placement) -> None:
    for name, why in refused(placement).items():
        reasons = [got["refused"] for got in report[name]]
        assert [why in reason for reason in reasons] == [True] * sum(placement), reasons


def got_by_each(report: Report, placement: Placement, what: str) -> Iterator[list[Any]]:
    """Yield the results of all ranks, for each communicator in turn."""
    for name in COMMUNICATORS:
        if name not in refused(placement):
            yield [got[what] for got in report[name]]


@pytest.mark.parametrize("what", ["mean_grad", "mean_grad_by_float16"])
def test_mean_grad(report: Report, placement: Placement, what: str) -> None:
    size = sum(placement)
    replicas = [exchange.gradients(rank, size) for rank in range(size)]
    expected = [np.mean(grads, axis=0).tolist() for grads in zip(*replicas, strict=True)]
    for got in got_by_each(report, placement, what):
        assert got == [expected] * size


def test_collectives(report: Report, placement: Placement) -> None:
    size = sum(placement)
    arrays = [[10 * rank, 10 * rank + 1, 10 * rank + 2] for rank in range(size)]
    expected = {
        "allreduce": [sum(column) for column in zip(*arrays, strict=True)],
        "bcast": arrays[-1],
        "allgather": arrays,
        "alltoall": arrays,
        "bcast_obj": {"from": 0},
    }
    for got in got_by_each(report, placement, "collectives"):
        assert got == [expected] * size


@pytest.mark.parametrize("how", ["trained", "trained_overlapping"])
def test_training(report: Report, placement: Placement, how: str) -> None:
    alone = exchange.network()
    optimizer = exchange.optimizer().setup(alone)
    for step in range(exchange.STEPS):
        optimizer.update(exchange.loss, alone, *exchange.examples(step))
    for trained in got_by_each(report, placement, how):
        assert trained == [trained[0]] * sum(placement)  # bit by bit
        for values, expected in zip(trained[0], exchange.values(alone), strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-14)
