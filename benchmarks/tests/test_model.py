"""Properties of the cost model that need no machine, and its page, from made-up figures."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cost_model, figures, model, report
from benchmarks.cost_model import Counts, Job
from benchmarks.figures import Group, Measured
from benchmarks.networks import link_seconds

MACHINE = Counts(1e-4, 1e-3, 2e-5, 1e-9, 1e-10)
FITTED = [Job(n, hosts, per_host, 2) for n in model.SIZES for hosts, per_host in model.FITTED]


@pytest.mark.parametrize(("hosts", "n_bytes"), [(2, 4e5), (4, 4e6), (16, 4e5), (16, 4e6)])
def test_one_rank_on_each_host_sends_no_more_than_it_has_to(hosts: int, n_bytes: float) -> None:
    job = Job(n_bytes, hosts, 1, 2)
    assert cost_model.link(job) == pytest.approx(link_seconds(n_bytes, hosts))


def test_two_ranks_on_a_host_both_send_but_along_a_ring() -> None:
    # Each rank sends 14 of 16 shards to other hosts; along a ring, only 15 leave a host.
    assert cost_model.link(Job(4e5, 8, 2, 2)) == pytest.approx(
        link_seconds(2 * (2 * 14 / 16) * 4e5, 2)
    )
    assert cost_model.link(Job(4e6, 8, 2, 2)) == pytest.approx(
        link_seconds((2 * 14 + 15) / 16 * 4e6, 2)
    )


def test_on_one_host_no_link_is_busy() -> None:
    assert cost_model.link(Job(4e6, 1, 64, 2)) == 0
    counts = cost_model.counts_of(Job(4e6, 1, 64, 2))
    assert counts.messages == counts.sent_bytes == 0


def test_a_byte_for_the_same_host_is_copied_and_not_sent() -> None:
    apart, together = (cost_model.counts_of(Job(4e5, hosts, 16 // hosts, 2)) for hosts in (16, 4))
    assert together.sent_bytes < apart.sent_bytes
    assert sum(astuple(together)[-2:]) == sum(astuple(apart)[-2:])


def test_ranks_with_cores_of_their_own_do_not_wait_for_one() -> None:
    assert cost_model.counts_of(Job(4e5, 1, 8, 8)).turns == 0
    # Three doublings to agree, each for half the ranks; then three meetings for two chunks.
    assert cost_model.counts_of(Job(4e5, 1, 8, 2)).turns == 4.5
    # With this many ranks, each adds in turn: they agree, add two chunks, and read.
    assert cost_model.counts_of(Job(4e5, 1, 64, 2)).turns == 4


def test_ranks_that_share_a_core_take_turns() -> None:
    few, many = Job(4e5, 1, 8, 8), Job(4e5, 1, 8, 4)
    free = Counts(1e-4, 0, 2e-5, 1e-9, 1e-10)
    assert cost_model.cores(many, free) == pytest.approx(2 * cost_model.cores(few, free))


@pytest.mark.parametrize("kind", model.KINDS)
def test_fit_finds_the_costs_that_made_the_times(kind: str) -> None:
    jobs = [job for job in FITTED if model.KINDS[kind](job)]
    found = cost_model.fit(jobs, [cost_model.cores(job, MACHINE) for job in jobs])
    for job in jobs:
        assert cost_model.cores(job, found) == pytest.approx(cost_model.cores(job, MACHINE))
    if kind == "several hosts":
        assert np.allclose(astuple(found), astuple(MACHINE))


def test_the_page_says_where_predictions_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    groups = []
    for hosts, per_host in (*model.FITTED, (16, 1), (1, 32)):
        rows = []
        for n in model.SIZES:
            job = Job(n, hosts, per_host, 2)
            link = 0.0 if model.is_fitted(job) else cost_model.link(job)
            seconds = max(cost_model.cores(job, MACHINE), link)
            slower = 2 if (hosts, n) == (16, model.SIZES[0]) else 1.1
            rows.append(Measured(str(n), [seconds if model.is_fitted(job) else slower * seconds]))
        key = {"hosts": str(hosts), "per_host": str(per_host), "cores": "2"}
        groups.append(Group(model.title_of(hosts, per_host), key, rows, rows[0].name))
    report.save("model", "mpich", groups, [])
    model.write("model")
    text = (tmp_path / "model.md").read_text()
    assert "| 16 ranks, 16 hosts | 4 |" in text
    off = "- Predictions that are off by more than 15 %:"
    assert [line for line in text.splitlines() if line.startswith(off)] == [
        f"{off} none",
        f"{off} none",
        f"{off} 16 ranks, 16 hosts, 4 kB",
    ]
