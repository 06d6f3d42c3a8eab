"""What is known of the algorithms without any formula; a fit finds the costs of a machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import cost_model
from benchmarks.cost_model import ALGORITHMS, Compute, Counts, Job
from benchmarks.link import link_seconds, wire_bytes

TENSORS = (4096.0, 2.0**20, 2.0**22)
PLACES = list(itertools.product((1, 2, 4, 128), (1, 2, 8)))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("hosts", "per_host"), PLACES)
def test_no_exchange_is_faster_than_the_link(name: str, hosts: int, per_host: int) -> None:
    counts = ALGORITHMS[name](Job(hosts, per_host, TENSORS))
    least = wire_bytes(sum(TENSORS), hosts)
    assert counts.link_bytes >= 0.999 * least
    if name in ("hierarchical", "two_dimensional") or per_host == 1:
        small = 2 * hosts * TENSORS[0] * per_host  # which go to everybody
        assert counts.link_bytes <= least + small


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_has_nobody_to_talk_to(name: str) -> None:
    counts = ALGORITHMS[name](Job(1, 1, TENSORS))
    assert counts.link_messages == counts.host_messages == counts.added_bytes == 0
    assert counts.link_bytes == counts.host_bytes == 0


def test_all_sums_are_made_once() -> None:
    """Together the ranks add N - 1 arrays, however they divide the work."""
    for job in (Job(4, 8, TENSORS), Job(1, 8, TENSORS)):
        added = cost_model.flat(job).added_bytes
        assert added * job.ranks == pytest.approx((job.ranks - 1) * job.n_bytes)


def test_short_messages_go_to_everybody() -> None:
    assert cost_model.allreduce(8, 8, 1) == Counts(link_messages=7, link_bytes=56, added_bytes=56)


def test_naive_does_not_copy_and_flat_does() -> None:
    job = Job(16, 1, TENSORS)
    assert cost_model.naive(job).copied_bytes == 0
    assert cost_model.flat(job).copied_bytes == 2 * job.n_bytes


def test_on_one_host_nothing_goes_over_the_link() -> None:
    for count in ALGORITHMS.values():
        counts = count(Job(1, 8, TENSORS))
        assert counts.link_messages == counts.link_bytes == 0


def test_half_sends_half_and_casts_all() -> None:
    job = Job(2, 1, TENSORS)
    counts = cost_model.half(cost_model.flat, job)
    assert counts.link_bytes == job.n_bytes / 2
    assert counts.cast_bytes == 2 * job.n_bytes


@pytest.mark.parametrize(("exchange", "expected"), [(0.5, 3.6), (2, 3.6), (5, 6.5)])
def test_overlap_hides_what_backward_outlasts(exchange: float, expected: float) -> None:
    compute = Compute(forward=1, backward=2, step=0.5)
    assert cost_model.overlapped(compute, exchange, last=0.1) == pytest.approx(expected)
    assert cost_model.plain(compute, exchange) == 3.5 + exchange
    assert cost_model.double_buffered(compute, exchange) == max(3, exchange) + 0.5


def test_fit_finds_the_costs_of_a_machine() -> None:
    machine = Counts(5e-5, 8e-9, 1e-6, 2e-10, 1e-10, 1e-10, 0)
    known = Counts(added_bytes=1e-10, copied_bytes=1e-10)
    places = [(1, 2), (2, 1), (4, 1), (2, 2)]
    counts = [
        cost_model.allreduce(float(n), *place) for n in (8, 2**16, 2**24) for place in places
    ]
    found = cost_model.fit(counts, [c.seconds(machine) for c in counts], known)
    assert np.allclose(found.as_array(), machine.as_array(), rtol=1e-6)


def test_gigabit_carries_119_5_megabytes_a_second() -> None:
    assert link_seconds(119.55e6, 2) == pytest.approx(1, rel=1e-3)
    assert link_seconds(1, 1) == 0
