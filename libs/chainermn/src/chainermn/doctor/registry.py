"""Checks: what they find, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from chainermn.doctor.setup import Setup


class Status(StrEnum):
    """How a check ended."""

    GOOD = "✓"
    BAD = "✗"
    NOT_TRIED = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes
    ----------
    status : Status
    found : str
        What is there; for `Status.NOT_TRIED`, why the check did not look.
    remedy : str
        For `Status.BAD`, what to do.
    command : str
        For `Status.BAD`, what to type; empty if no single command helps.
    """

    status: Status
    found: str
    remedy: str = ""
    command: str = ""


def good(found: str) -> Finding:
    """Return that all is well."""
    return Finding(Status.GOOD, found)


def bad(found: str, remedy: str, command: str = "") -> Finding:
    """Return that something is wrong, what to do, and what to type."""
    return Finding(Status.BAD, found, remedy, command)


def not_tried(why: str) -> Finding:
    """Return that the check does not apply, and why."""
    return Finding(Status.NOT_TRIED, why)


_NEEDS = "needs: "

Examine: TypeAlias = Callable[[Setup], Finding]


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes
    ----------
    subject : str
        Heading of the row.
    name : str
    examine : callable
        Takes a `Setup` and returns a `Finding`.
    needs : tuple of str
        Names of checks that must succeed before this one is run.
    blames : tuple of str
        Names of checks whose failure explains a failure of this one.
    """

    subject: str
    name: str
    examine: Examine
    needs: tuple[str, ...] = ()
    blames: tuple[str, ...] = ()


def check(
    subject: str, name: str, *, needs: Iterable[str] = (), blames: Iterable[str] = ()
) -> Callable[[Examine], Check]:
    """Make the decorated function a `Check`."""
    return lambda examine: Check(subject, name, examine, tuple(needs), tuple(blames))


def run_checks(checks: Iterable[Check], setup: Setup) -> Iterator[tuple[Check, Finding]]:
    """Run checks in turn."""
    findings: dict[str, Finding] = {}
    for each in checks:
        findings[each.name] = _run_check(each, setup, findings)
        yield each, findings[each.name]


def _run_check(each: Check, setup: Setup, before: dict[str, Finding]) -> Finding:
    """Run one check, unless an earlier finding already tells the cause of its failure."""
    for name in each.needs:
        if before[name].found.startswith(_NEEDS):
            return before[name]
        if before[name].status is not Status.GOOD:
            return not_tried(f"{_NEEDS}{name}")
    try:
        finding = each.examine(setup)
    except Exception as error:
        finding = bad(
            f"the check itself fails with {type(error).__name__}: {error}",
            "this is a fault of the doctor; please report it with this output",
        )
    if finding.status is Status.BAD:
        for name in each.blames:
            if before[name].status is Status.BAD:
                return not_tried(f"{_NEEDS}{name}")
    return finding
