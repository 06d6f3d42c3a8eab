"""Verdicts on the tasks of ``ci/prove_on_gpu.py``, and their table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

#: Variable with the name of the file for the outcomes of tests.
FILE = "PROVE_ON_GPU_OUTCOMES"

PROVED, FAILED, SKIPPED, NOT_REACHED = "proved", "failed", "skipped", "not reached"
#: The task succeeded as far as it can without a GPU.
REHEARSED = "rehearsed"
#: A test that was skipped has shown nothing, whatever the reason.
_MEANING = {
    SKIPPED: "skipped: **not proved**",
    FAILED: "**failed**",
    REHEARSED: "rehearsed: **not proved**",
}
_MOST_NAMES = 10
_LONGEST_REASON = 200


@dataclass
class Outcome:
    """How a task ended.

    Attributes
    ----------
    name, title : str
        Name and title of the task.
    verdict : {'proved', 'failed', 'skipped', 'not reached', 'rehearsed'}
    passed : int
        Number of tests that passed.
    failed : list of str
        Names of tests that failed.
    skipped : dict
        Number of tests that were skipped, for each reason.
    seconds : float
    note : str
        Anything else that readers should know.
    """

    name: str
    title: str
    verdict: str = NOT_REACHED
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""

    def explain(self) -> str:
        """Return one line with the note, reasons of skipped tests, and names of failed tests."""
        parts = [self.note] if self.note else []
        for reason, number in self.skipped.items():
            parts.append(f"{number} skipped: {reason[:_LONGEST_REASON]}")
        parts += [f"`{name}`" for name in self.failed[:_MOST_NAMES]]
        if more := len(self.failed) - _MOST_NAMES:
            parts += [f"and {more} more"] * (more > 0)
        return " ".join("; ".join(parts).replace("|", "\\|").split())


def count_tests(outcome: Outcome, told: Iterable[str]) -> set[str]:
    """Count the outcomes that `tell_outcomes` wrote; return the names of the tests.

    Parameters
    ----------
    outcome : Outcome
    told : iterable of str
        Lines of JSON. The last may be incomplete.
    """
    names, skipped = set(), Counter[str]()
    for line in told:
        try:
            test = json.loads(line)
        except ValueError:
            continue
        names.add(test["test"])
        if test["outcome"] == "passed":
            outcome.passed += 1
        elif test["outcome"] == "failed":
            outcome.failed.append(test["test"])
        else:
            skipped[test["reason"].removeprefix("Skipped: ")] += 1
    outcome.skipped = dict(skipped.most_common())
    return names


def judge(outcome: Outcome, codes: Sequence[int], *, is_tests: bool, is_complete: bool) -> str:
    """Return the verdict on a task.

    Parameters
    ----------
    outcome : Outcome
        Outcome that has the counts of its tests.
    codes : sequence of int
        Exit codes of its commands.
    is_tests : bool
        Whether the task is proved by tests. At least one has to pass.
    is_complete : bool
        Whether all commands ended by themselves.
    """
    if outcome.failed or any(codes):
        return FAILED
    if not is_complete:
        return NOT_REACHED
    if is_tests and not outcome.passed:
        return SKIPPED if outcome.skipped else FAILED
    return PROVED


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the verdicts as a table in Markdown."""
    lines = [
        "| task | verdict | passed | failed | skipped | seconds | notes |",
        f"|---|---{4 * '|---:'}|---|",
    ]
    for each in outcomes:
        numbers = (each.passed, len(each.failed), sum(each.skipped.values()), round(each.seconds))
        cells = [each.title, _MEANING.get(each.verdict, each.verdict), *map(str, numbers)]
        lines.append(f"| {' | '.join([*cells, each.explain()])} |")
    return lines


def save(path: Path, about: dict[str, Any], outcomes: Iterable[Outcome]) -> None:
    """Write the outcomes and the description of the run, completely or not at all."""
    content = {"about": about, "outcomes": [asdict(outcome) for outcome in outcomes]}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load(path: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Return the description of the run and its outcomes, as `save` wrote them."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["about"], [Outcome(**outcome) for outcome in content["outcomes"]]


def merge(runs: Sequence[tuple[dict[str, Any], list[Outcome]]]) -> list[Outcome]:
    """Return the last outcome of each task that was reached.

    If it comes from another commit than the last run, its note says so.
    """
    found: dict[str, Outcome] = {}
    last = runs[-1][0]["commit"]
    for about, outcomes in runs:
        for outcome in outcomes:
            before = found.get(outcome.name, Outcome(outcome.name, outcome.title))
            if outcome.verdict != NOT_REACHED or before.verdict == NOT_REACHED:
                of_another = f"at commit {about['commit']}" if about["commit"] != last else ""
                note = "; ".join(filter(None, [of_another, outcome.note]))
                found[outcome.name] = replace(outcome, note=note)
    return list(found.values())


def merge_figures(runs: Sequence[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """Return the last measurement of each group.

    If it comes from another commit than the last run, its notes say so.

    Parameters
    ----------
    runs : sequence of tuple
        What the benchmarks saved, and the commit.
    """
    content, last = runs[-1]
    groups: dict[str, dict[str, Any]] = {}
    for measured, commit in runs:
        notes = [f"At commit {commit}."] if commit != last else []
        for group in measured["groups"]:
            groups[group["title"]] = {**group, "notes": [*group["notes"], *notes]}
    about = {**content["about"], "commit": last}
    return {**content, "about": about, "groups": list(groups.values())}


def page(about: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """Return lines in Markdown: machine, command and verdicts."""
    machine = [f"    {line}" for line in about["machine"]]
    lines = [f"{about['date']}, commit {about['commit']}:", "", *machine, ""]
    return [*lines, f"    {about['command']}", "", *table(outcomes)]
