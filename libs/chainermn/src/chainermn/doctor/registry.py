"""Define checks and their findings, and run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from chainermn.doctor.setup import Setup
from chainermn.launch.hosts import printable


class Status(StrEnum):
    """How a check ended."""

    GOOD = "good"
    BAD = "bad"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Finding:
    """The result of a check, or why it was not tried; if bad, a remedy and the command to type."""

    status: Status
    found: str
    remedy: str = ""
    command: str = ""


good = partial(Finding, Status.GOOD)
bad = partial(Finding, Status.BAD)
not_tried = partial(Finding, Status.NOT_TRIED)

_NEEDS = "needs: "

Examine: TypeAlias = Callable[[Setup], Finding]


@dataclass(frozen=True)
class Check:
    """One row of the table.

    ``needs`` names checks that must succeed before this one runs; ``blames`` names checks whose
    failure explains a failure of this one.
    """

    subject: str
    name: str
    examine: Examine
    needs: Sequence[str] = ()
    blames: Sequence[str] = ()


def check(
    subject: str, name: str, *, needs: Sequence[str] = (), blames: Sequence[str] = ()
) -> Callable[[Examine], Check]:
    """Make the decorated function a `Check`."""
    return lambda examine: Check(subject, name, examine, needs, blames)


def run_checks(checks: Iterable[Check], setup: Setup) -> Iterator[tuple[Check, Finding]]:
    """Run checks one after another, and report each cause only once."""
    findings: dict[str, Finding] = {}
    for each in checks:
        finding = _run_check(each, setup, findings)
        # These texts may contain output from other hosts and programs.
        findings[each.name] = replace(
            finding,
            found=printable(finding.found),
            remedy=printable(finding.remedy),
            command=printable(finding.command),
        )
        yield each, findings[each.name]


def _run_check(each: Check, setup: Setup, before: dict[str, Finding]) -> Finding:
    for name in each.needs:
        if before[name].found.startswith(_NEEDS):
            return before[name]
        if before[name].status is not Status.GOOD:
            return not_tried(f"{_NEEDS}{name}")
    try:
        finding = each.examine(setup)
    except Exception as error:
        finding = bad(
            f"the check itself failed with {type(error).__name__}: {error}",
            "this is a bug in the doctor; please report it with the output of this command",
        )
    if finding.status is Status.BAD:
        for name in each.blames:
            if before[name].status is Status.BAD:
                return not_tried(f"{_NEEDS}{name}")
    return finding
