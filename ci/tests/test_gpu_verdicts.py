"""Verdicts on tasks for GPUs: nothing that was skipped or cut off counts as proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.gpu_proof import verdicts
from ci.gpu_proof.verdicts import FAILED, NOT_REACHED, PROVED, SKIPPED, Outcome


def told(outcome: str, test: str = "test_it", reason: str = "") -> str:
    return json.dumps({"test": test, "outcome": outcome, "reason": reason})


def judged(lines: list[str], codes: list[int], is_complete: bool = True) -> Outcome:
    outcome = Outcome("task", "a task")
    verdicts.count_tests(outcome, lines)
    outcome.verdict = verdicts.judge(outcome, codes, is_tests=True, is_complete=is_complete)
    return outcome


@pytest.mark.parametrize(
    ("lines", "codes", "is_complete", "verdict"),
    [
        ([told("passed")], [0], True, PROVED),
        ([told("passed"), told("skipped", reason="Skipped: no NCCL")], [0], True, PROVED),
        ([told("skipped", reason="Skipped: no GPU")], [0], True, SKIPPED),
        ([], [0], True, FAILED),  # no test at all
        ([told("passed"), told("failed")], [1], True, FAILED),
        ([told("passed")], [-11], True, FAILED),  # a segmentation fault, after a test
        ([told("passed")], [], False, NOT_REACHED),
        ([told("passed"), told("failed")], [], False, FAILED),
    ],
)
def test_verdicts(lines: list[str], codes: list[int], is_complete: bool, verdict: str) -> None:
    assert judged(lines, codes, is_complete).verdict == verdict


def test_a_task_without_tests_is_proved_by_its_exit_code() -> None:
    outcome = Outcome("task", "a task")
    judge = verdicts.judge
    assert judge(outcome, [0, 0], is_tests=False, is_complete=True) == PROVED
    assert judge(outcome, [0, 3], is_tests=False, is_complete=True) == FAILED


def test_a_line_that_was_cut_off_is_not_counted() -> None:
    outcome = Outcome("task", "a task")
    names = verdicts.count_tests(outcome, [told("passed", "a"), told("passed", "b")[:-5]])
    assert (names, outcome.passed, outcome.failed, outcome.skipped) == ({"a"}, 1, [], {})


def test_the_table_says_why_and_how_many() -> None:
    skipped = [told("skipped", reason="Skipped: 2 ranks | 1 GPU")] * 3
    outcomes = [
        judged([told("passed"), *skipped], [0]),
        judged(skipped, [0]),
        judged([told("failed", f"test_{n}") for n in range(12)], [1]),
        Outcome("late", "what came last", note="no time was left"),
    ]
    rows = verdicts.table(outcomes)[2:]
    assert rows[0] == "| a task | proved | 1 | 0 | 3 | 0 | 3 skipped: 2 ranks \\| 1 GPU |"
    assert rows[1].startswith("| a task | skipped: **not proved** | 0 | 0 | 3 |")
    assert rows[2].startswith("| a task | **failed** | 0 | 12 | 0 | 0 | `test_0`; `test_1`;")
    assert rows[2].endswith("`test_9`; and 2 more |")
    assert rows[3] == "| what came last | not reached | 0 | 0 | 0 | 0 | no time was left |"


def test_a_later_run_completes_an_earlier_one(tmp_path: Path) -> None:
    first = [Outcome("a", "A", PROVED), Outcome("b", "B", FAILED), Outcome("c", "C")]
    second = [Outcome("a", "A"), Outcome("b", "B", PROVED), Outcome("c", "C", SKIPPED)]
    for commit, outcomes in (("old", first), ("new", second)):
        verdicts.save(tmp_path / f"{commit}.json", {"commit": commit}, outcomes)
    runs = [verdicts.load(tmp_path / f"{commit}.json") for commit in ("old", "new")]
    assert [about for about, _ in runs] == [{"commit": "old"}, {"commit": "new"}]
    merged = verdicts.merge(runs)
    assert [outcome.verdict for outcome in merged] == [PROVED, PROVED, SKIPPED]
    assert [outcome.note for outcome in merged] == ["at commit old", "", ""]
