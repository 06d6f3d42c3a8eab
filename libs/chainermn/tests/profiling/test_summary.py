"""Where the time of several ranks goes, and what users are told about it."""

from __future__ import annotations

from typing import Any

import pytest

from chainermn.profiling.timeline.clocks import Clock, Offset
from chainermn.profiling.timeline.iterations import KINDS, Iteration
from chainermn.profiling.timeline.summary import PARTS, Summary, summarize
from chainermn.profiling.timeline.waiting import Call

MS = 10**6


def rank(
    *, late: int = 0, iterations: int = 2, length: int = 100, ahead: int = 0, **ms: float
) -> list[Iteration]:
    """Return equal iterations of ``length`` ms, with ``ms`` of each kind; the rest is compute.

    Each ends with an exchange, which starts ``late`` ms after the first rank's. The rank's clock
    is ``ahead`` ms fast.
    """
    ms = {"exchange": 30 - late, **ms}
    ms.setdefault("compute", length - sum(ms.values()))
    nanoseconds = {kind: int(ms.get(kind, 0) * MS) for kind in KINDS}
    found = []
    for index in range(iterations):
        end = (index + 1) * length + ahead
        call = Call("c", index, (end - int(ms["exchange"])) * MS, end * MS)
        found.append(Iteration(nanoseconds, [("exchange", call)], {}))
    return found


def of(*ranks: list[Iteration]) -> Summary:
    return summarize(ranks, [None] * len(ranks))


def test_the_wait_is_told_from_the_exchange() -> None:
    summary = of(rank(), rank(late=20, data=40), rank(late=5))
    assert [one.seconds["waiting"] for one in summary.ranks] == pytest.approx([0.02, 0, 0.015])
    assert [one.seconds["exchange"] for one in summary.ranks] == pytest.approx([0.01] * 3)
    assert [one.iteration for one in summary.ranks] == pytest.approx([0.1] * 3)
    assert summary.mean("waiting") == pytest.approx(0.035 / 3)
    assert summary.slowest("data") == (1, pytest.approx(0.04))
    assert summary.iteration == pytest.approx(sum(map(summary.mean, PARTS)))
    assert summary.efficiency == pytest.approx(1 - (0.01 + 0.035 / 3) / 0.1)


def test_the_straggler_and_what_it_is_slow_at() -> None:
    straggler = of(rank(data=5), rank(late=20, data=45), rank(data=15)).straggler
    assert straggler is not None
    assert (straggler.rank, straggler.part) == (1, "data")
    assert straggler.delay == pytest.approx(0.02)
    assert (straggler.seconds, straggler.others) == pytest.approx((0.045, 0.01))
    assert str(straggler) == (
        "rank 1 keeps the others waiting for 20 ms per iteration: getting a batch takes "
        "45 ms there, and 10 ms on the others"
    )


@pytest.mark.parametrize("ranks", [[rank()], [rank(), rank(late=1)]])
def test_nobody_is_called_a_straggler_for_nothing(ranks: Any) -> None:
    assert of(*ranks).straggler is None


def test_times_are_put_on_one_clock() -> None:
    def clock(offset: int) -> Clock:
        return Clock(Offset(offset * MS, 0, at=0), Offset(offset * MS, 0, at=1))

    ranks = [rank(), rank(late=20, ahead=5000), rank(late=5, ahead=-7000)]
    summary = summarize(ranks, [clock(0), clock(-5000), clock(7000)])
    assert [one.seconds["waiting"] for one in summary.ranks] == pytest.approx([0.02, 0, 0.015])


def advice(*ranks: list[Iteration]) -> str:
    return "\n".join(of(*ranks).advice())


def test_advice_on_data_counts_the_iterations() -> None:
    slow = rank(iterations=3, data=70, exchange=5) + rank(iterations=1, exchange=5)
    assert advice(rank(exchange=5), slow).startswith(
        "75% of rank 1's iterations wait for data: use a MultiprocessIterator, or give it "
        "more processes (--loaderjob in the apps)"
    )


def test_advice_on_a_rank_that_computes_slowly_leads_to_the_doctor() -> None:
    found = advice(rank(), rank(late=20), rank())
    assert "rank 1 keeps the others waiting for 20 ms" in found
    assert "chainermn doctor" in found


def test_host_of_the_straggler_is_named() -> None:
    ranks, clocks = [rank(), rank(late=20), rank()], [None] * 3
    (found,) = summarize(ranks, clocks, ["host00", "host01", "host01"]).advice()
    assert found.startswith("rank 1 on host01 keeps the others waiting for 20 ms")
    (found,) = summarize(ranks, clocks, ["host00"] * 3).advice()
    assert found.startswith("rank 1 keeps the others waiting for 20 ms")


def test_advice_on_an_extension_that_keeps_the_others_waiting() -> None:
    late = rank(late=20, extensions=40)
    late[0].extensions.update({"LogReport": 10 * MS, "PlotReport": 70 * MS})
    assert advice(rank(), late, rank()).startswith(
        "rank 1 keeps the others waiting for 20 ms per iteration: running extensions takes "
        "40 ms there, and 0 ms on the others. PlotReport takes most of it, 35 ms: give it"
    )


def test_advice_where_the_straggler_changes() -> None:
    # Ranks 0 and 1 take turns waiting 50 ms for each other.
    ranks = [rank(exchange=50), rank(exchange=50)]
    for index, late in enumerate(ranks):
        kind, call = late[index].calls[0]
        late[index].calls[0] = kind, call._replace(start=call.end)
    assert of(*ranks).straggler is None
    assert advice(*ranks).startswith(
        "ranks spend 25% of the time waiting for each other, for a different"
    )


@pytest.mark.parametrize(
    "part", ["layers", "exchange", "evaluation", "checkpoint", "extensions", "other"]
)
def test_advice_on_what_takes_much_of_the_time(part: str) -> None:
    work = {
        "layers": "40% of the time goes into exchanges inside layers, such as",
        "exchange": "40% of the time goes into the exchange of gradients: larger batches",
        "evaluation": "40% of the time goes into evaluation: evaluate less often",
        "checkpoint": "40% of the time goes into checkpoints: write checkpoints less often",
        "extensions": "40% of the time goes into extensions: some take long",
        "other": "40% of the time goes into work outside the steps: look for",
    }[part]
    taken = {"exchange": 0, **{part: 40}}
    assert advice(rank(**taken), rank(**taken)).startswith(work)


def test_advice_on_the_exchange_between_hosts() -> None:
    ranks = [rank(exchange=40), rank(exchange=40)]
    (found,) = summarize(ranks, [None, None], ["a", "b"]).advice()
    assert found.startswith(
        "40% of the time goes into the exchange of gradients: try overlap=True"
    )


def test_the_wait_is_taken_out_of_what_it_was_part_of() -> None:
    ranks = [rank(evaluation=40, exchange=0), rank(evaluation=40, exchange=0)]
    for one, start in zip(ranks, (10, 30), strict=True):
        one[0].calls[:] = [("evaluation", Call("c", 0, start * MS, 40 * MS))]
    summary = of(*ranks)
    assert summary.ranks[0].seconds["evaluation"] == pytest.approx(0.03)
    assert summary.ranks[0].seconds["waiting"] == pytest.approx(0.01)
    assert summary.ranks[1].seconds["evaluation"] == pytest.approx(0.04)
    assert summary.efficiency == pytest.approx(0.95)


def test_no_advice_where_nothing_stands_out() -> None:
    assert advice(rank(exchange=10), rank(exchange=10)) == ""
