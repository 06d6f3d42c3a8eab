"""Verdicts on the reports of ranks."""

from __future__ import annotations

import pytest

from chainermn.failures.judgment import Judge, RankState, Verdict
from chainermn.failures.limits import stall_limit
from chainermn.failures.wait import Wait, as_ranges, from_ranges

NOW, LIMIT = 1000.0, 10.0
STREAM = "communicator 1 of ranks 0-2"


def call(number: int, seconds: float, operation: str = "allreduce", stream: str = STREAM) -> Wait:
    return Wait(stream, number, operation, "0-2", NOW - seconds)


def message(number: int, source: int, dest: int, here: int, seconds: float) -> Wait:
    operation = f"send to rank {dest}" if here == source else f"recv from rank {source}"
    stream = f"{STREAM}, messages from rank {source} to rank {dest}"
    return Wait(stream, number, operation, as_ranges(sorted((source, dest))), NOW - seconds)


def ranks(*waits: Wait | None, counts: int = 4) -> list[RankState]:
    """Return ranks whose main threads are in these calls. Each has begun ``counts`` calls."""
    return [
        RankState(rank, "host", 100 + rank, wait, [], {STREAM: counts}, "train.py:7", heard_at=NOW)
        for rank, wait in enumerate(waits)
    ]


def judged(states: list[RankState], limit: float = LIMIT) -> list[Verdict]:
    return Judge(states, NOW, limit).verdicts()


def test_nothing_is_wrong_while_ranks_wait_a_little() -> None:
    assert judged(ranks(call(5, 9.0), call(5, 1.0), None)) == []


def test_rank_has_left_without_a_call_that_others_are_in() -> None:
    states = ranks(call(5, 0.1), call(5, 0.1), None)
    states[2].left_at = NOW
    (verdict,) = judged(states, limit=0)
    assert verdict.is_fatal
    assert "rank 2 on host has ended its script" in verdict.text
    assert "allreduce (call 5 on communicator 1 of ranks 0-2)" in verdict.text


@pytest.mark.parametrize("number", [1, 4])
def test_rank_may_leave_after_its_part_of_a_call(number: int) -> None:
    states = ranks(call(number, 0.1), None, None)
    states[2].left_at = NOW
    assert judged(states) == []


@pytest.mark.parametrize(("sent", "is_fatal"), [(2, False), (1, True)])
def test_message_of_a_rank_that_has_left(sent: int, is_fatal: bool) -> None:
    wait = message(2, source=1, dest=0, here=0, seconds=0.1)
    states = ranks(wait, None, None)
    states[1].left_at = NOW
    states[1].counts[wait.stream] = sent
    assert [verdict.is_fatal for verdict in judged(states)] == [True] * is_fatal


def test_silent_rank() -> None:
    states = ranks(None, None, None)
    states[1].heard_at = NOW - LIMIT - 1
    (verdict,) = judged(states)
    assert verdict.is_fatal
    assert "rank 1 on host (process 101) has been silent for 11 s" in verdict.text
    assert judged(states, limit=0) == []


def test_silent_rank_is_shown_with_the_first_call_in_which_others_wait_for_it() -> None:
    states = ranks(call(5, 3.0), call(6, 1.0), None)
    states[2].heard_at = NOW - LIMIT - 1
    (verdict,) = judged(states)
    assert "allreduce (call 5 on communicator 1 of ranks 0-2)" in verdict.text
    assert "HAS NOT arrived: rank 2 on host" in verdict.text
    assert "    has arrived: rank 0 on host" in verdict.text


def test_rank_that_computes_is_only_warned_of() -> None:
    states = ranks(call(5, 11.0), call(5, 12.0), None)
    (verdict,) = judged(states)
    assert not verdict.is_fatal
    assert "HAS NOT arrived: rank 2 on host, which is at train.py:7" in verdict.text
    assert "waited 12 s" in verdict.text


def test_rank_that_does_not_report_is_only_warned_of() -> None:
    (verdict,) = judged(ranks(call(5, 11.0), call(5, 11.0)))
    assert not verdict.is_fatal
    assert "HAS NOT arrived: rank 2 on a host that does not report" in verdict.text


def test_different_calls_at_the_same_time_are_a_deadlock() -> None:
    states = ranks(call(5, 11.0), call(5, 11.0, "bcast"), call(5, 11.0))
    verdict = judged(states)[0]
    assert verdict.is_fatal
    assert "these ranks wait for each other" in verdict.text
    assert f"rank 1 on host has been in bcast (call 5 on {STREAM}) for 11.0 s, at" in verdict.text


@pytest.mark.parametrize(
    ("one", "other", "limit", "is_noticed"),
    [
        (call(5, 1.1), call(5, 1.2, "bcast"), 300, True),
        (call(5, 1.1), call(5, 0.9, "bcast"), 300, False),
        (call(5, 0.6), call(5, 0.6, "bcast"), 0.5, True),
        (call(5, 99.0), call(5, 99.0), 300, False),
        (call(5, 99.0), call(5, 99.0, "bcast"), 0, False),
        (call(5, 99.0), call(6, 99.0, "bcast"), 300, False),  # it was in call 5 before
        (call(5, 99.0), call(5, 99.0, "bcast", "another"), 300, False),
        (message(1, 0, 1, 0, 99.0), message(1, 0, 1, 1, 99.0), 300, False),
        (message(1, 0, 1, 0, 99.0), message(1, 1, 0, 1, 99.0), 300, False),
    ],
)
def test_calls_that_can_never_match_are_noticed_long_before_the_limit(
    one: Wait, other: Wait, limit: float, is_noticed: bool
) -> None:
    verdicts = judged(ranks(one, other, None, counts=5), limit)
    assert any(verdict.is_fatal for verdict in verdicts) == is_noticed


def test_of_many_ranks_the_one_that_is_elsewhere_comes_first() -> None:
    waits = [call(5, 1.1)._replace(members="0-99")] * 99
    states = ranks(*waits[:60], waits[0]._replace(operation="bcast_obj"), *waits[60:])
    lines = judged(states, limit=300)[0].text.splitlines()
    assert lines[1].startswith("  rank 60 on host has been in bcast_obj (call 5 on ")
    assert lines[2].startswith("  rank 0 on host has been in allreduce (call 5 on ")


def test_extension_of_some_ranks_only_is_named() -> None:
    caller = "extension 'validation' (Evaluator)"
    evaluating, updating = call(5, 11.0, "bcast_obj")._replace(caller=caller), call(5, 11.0)
    verdict = judged(ranks(evaluating, updating, updating))[0]
    assert f"for 11.0 s, called by {caller}, at train.py:7" in verdict.text
    assert f"Only some of these ranks are in {caller}. An extension that" in verdict.text
    assert "must be added to the trainers of all ranks, with the same trigger." in verdict.text
    assert "the ranks have different numbers of batches" in verdict.text
    assert "create_multi_node_optimizer(..., uneven=True)" in verdict.text


def test_extension_that_others_have_ended_without_is_named() -> None:
    caller = "extension 'validation' (Evaluator)"
    states = ranks(call(5, 0.1)._replace(caller=caller), None, None)
    states[1].left_at = states[2].left_at = NOW
    assert f"Only some of these ranks are in {caller}. " in judged(states)[0].text


def test_extension_of_all_ranks_is_not_to_blame() -> None:
    caller = "extension 'validation' (Evaluator)"
    waits = [call(5, 11.0, operation)._replace(caller=caller) for operation in ("a", "b", "b")]
    verdict = judged(ranks(*waits))[0]
    assert "these ranks wait for each other" in verdict.text
    assert "Only some" not in verdict.text


def test_calls_on_different_communicators_are_a_deadlock() -> None:
    states = ranks(call(5, 11.0), call(1, 11.0, stream="another"), call(5, 11.0))
    assert judged(states)[0].is_fatal


def test_ranks_that_receive_in_a_ring_are_a_deadlock() -> None:
    states = ranks(
        *(message(1, source=(r + 1) % 3, dest=r, here=r, seconds=11.0) for r in range(3))
    )
    assert judged(states)[0].is_fatal


def test_rank_that_waits_for_one_that_computes_is_no_deadlock() -> None:
    states = ranks(call(5, 20.0), message(1, source=2, dest=1, here=1, seconds=20.0), None)
    assert judged(states)
    assert not any(verdict.is_fatal for verdict in judged(states))


def test_of_a_chain_of_ranks_only_the_first_call_is_shown() -> None:
    (verdict,) = judged(ranks(None, message(1, 0, 1, 1, 30.0), message(1, 1, 2, 2, 40.0)))
    assert not verdict.is_fatal
    assert "recv from rank 0 (call 1 on" in verdict.text
    assert "HAS NOT arrived: rank 0 on host, which is at train.py:7" in verdict.text
    assert "recv from rank 1" not in verdict.text


def test_ranks_that_wait_for_a_deadlock_are_part_of_it() -> None:
    ring = [message(1, 1 - rank, rank, rank, 20.0) for rank in range(2)]
    (verdict,) = judged(ranks(*ring, message(1, 0, 2, 2, 20.0)))
    assert verdict.is_fatal
    assert verdict.text.count("has been in recv") == 3


def test_message_that_both_have_come_to_is_no_deadlock() -> None:
    states = ranks(
        message(1, source=0, dest=1, here=0, seconds=11.0),
        message(1, source=0, dest=1, here=1, seconds=11.0),
        None,
    )
    verdicts = judged(states)
    assert not any(verdict.is_fatal for verdict in verdicts)
    assert "all ranks have arrived" in verdicts[0].text


@pytest.mark.parametrize(("seconds", "is_fatal"), [(99.0, False), (101.0, True)])
def test_call_that_all_have_come_to_gets_more_time(seconds: float, is_fatal: bool) -> None:
    states = ranks(*(call(5, seconds) for _ in range(3)))
    assert [verdict.is_fatal for verdict in judged(states)] == [is_fatal]


def test_ranks_that_have_left_long_ago_are_warned_of() -> None:
    states = ranks(None, None, None)
    states[0].left_at = NOW - 11
    (verdict,) = judged(states)
    assert not verdict.is_fatal
    assert "rank 1 on host is at train.py:7" in verdict.text


def test_long_lists_are_cut() -> None:
    states = [RankState(rank, "host", 1, heard_at=NOW) for rank in range(100)]
    states[99].main_wait = Wait("stream", 1, "bcast", "0-99", NOW - 11)
    (verdict,) = judged(states)
    assert "and 84 more" in verdict.text


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([3, 1, 2, 7], "3,1-2,7")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert as_ranges(numbers) == text
    assert list(from_ranges(text)) == numbers


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_limit_that_is_no_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", text)
    with pytest.raises(ValueError, match="must be a number of seconds"):
        stall_limit()


@pytest.mark.parametrize(("text", "limit"), [("", 300.0), ("0", 0.0), ("2.5", 2.5)])
def test_limit(text: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", text)
    assert stall_limit() == limit


def test_ranks_of_another_world_are_left_out() -> None:
    assert as_ranges([0, 1, -32766, -32766, 2]) == "0-2"


@pytest.mark.parametrize(
    "text",
    ["", "0-", "-1", "a", "2-1", "0-1048576", "0-9999999999,9999999999-0", "0-9," * 110_000 + "0"],
    ids=lambda text: text[:30],
)
def test_no_ranks(text: str) -> None:
    with pytest.raises(ValueError):
        from_ranges(text)
