"""Checks: what they are, what they find, and how they are run."""

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
        What is there; for `Status.NOT_TRIED`, why it was not looked at.
    remedy : str
        For `Status.BAD`, what to do.
    """

    status: Status
    found: str
    remedy: str = ""


def good(found: str) -> Finding:
    """Return that all is well."""
    return Finding(Status.GOOD, found)


def bad(found: str, remedy: str) -> Finding:
    """Return that something is wrong, and what to do."""
    return Finding(Status.BAD, found, remedy)


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
        Under which it is listed.
    name : str
    examine : callable
        Takes a `Setup` and returns a `Finding`.
    needs : tuple of str
        Names of checks without whose success this one says nothing.
    """

    subject: str
    name: str
    examine: Examine
    needs: tuple[str, ...] = ()


def check(subject: str, name: str, *, needs: Iterable[str] = ()) -> Callable[[Examine], Check]:
    """Make a `Check` of the function that follows."""
    return lambda examine: Check(subject, name, examine, tuple(needs))


def run_checks(checks: Iterable[Check], setup: Setup) -> Iterator[tuple[Check, Finding]]:
    """Run checks in turn. One that raises is a finding too."""
    findings: dict[str, Finding] = {}
    for each in checks:
        findings[each.name] = run_check(each, setup, findings)
        yield each, findings[each.name]


def run_check(each: Check, setup: Setup, before: dict[str, Finding]) -> Finding:
    """Run one check, given what those before it have found."""
    for name in each.needs:
        if before[name].found.startswith(_NEEDS):
            return before[name]
        if before[name].status is not Status.GOOD:
            return not_tried(f"{_NEEDS}{name}")
    try:
        return each.examine(setup)
    except Exception as error:
        return bad(
            f"the check itself fails with {type(error).__name__}: {error}",
            "this is a fault of the doctor; please report it with this output",
        )
