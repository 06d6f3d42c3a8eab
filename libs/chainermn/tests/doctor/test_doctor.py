"""``chainermn doctor`` as a whole, and how it puts its checks together."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from chainermn.doctor import report
from chainermn.doctor.checks import CHECKS
from chainermn.doctor.command import doctor
from chainermn.doctor.registry import Check, Finding, Status, bad, good, not_tried, run_checks
from chainermn.doctor.setup import Setup
from chainermn.process import THREAD_VARIABLES

HOSTS = {check.name for check in CHECKS if check.subject == "hosts"}
# A container may have little shared memory, and the doctor is right to say so.
DEPENDS_ON_THE_MACHINE = {"/dev/shm"}


@pytest.mark.each_mpi
def test_this_environment_is_fine() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        [sys.executable, "-m", "chainermn", "doctor", "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert shown.stderr == ""
    diagnosis = json.loads(shown.stdout)
    names: dict[str, set[str]] = {"good": set(), "bad": set(), "not tried": set()}
    for row in diagnosis["checks"]:
        names[row["status"]].add(row["name"])
    assert names["bad"] <= DEPENDS_ON_THE_MACHINE, diagnosis
    assert shown.returncode == bool(names["bad"])
    assert names["not tried"] >= HOSTS
    assert names["good"] | DEPENDS_ON_THE_MACHINE >= {
        check.name for check in CHECKS if check.subject in ("Python", "MPI")
    }
    assert diagnosis["versions"]["chainer"] == "7.8.1"
    assert diagnosis["versions"]["numpy"] == numpy.__version__
    assert sys.executable in diagnosis["versions"]["Python"]


def check_that(name: str, finding: Finding, *needs: str) -> Check:
    return Check("subject", name, lambda setup: finding, needs)


TREE = [
    check_that("fine", good("here")),
    check_that("wrong", bad("not here", "put it there")),
    check_that("after fine", good("too"), "fine"),
    check_that("after wrong", good("never seen"), "wrong"),
    check_that("after that", good("never seen"), "fine", "after wrong"),
    check_that("not for us", not_tried("no such thing here")),
    check_that("after not for us", good("never seen"), "not for us"),
]


def test_needs() -> None:
    findings = {check.name: finding for check, finding in run_checks(TREE, Setup())}
    assert findings == {
        "fine": good("here"),
        "wrong": bad("not here", "put it there"),
        "after fine": good("too"),
        "after wrong": not_tried("needs: wrong"),
        "after that": not_tried("needs: wrong"),
        "not for us": not_tried("no such thing here"),
        "after not for us": not_tried("needs: not for us"),
    }


def test_what_explains_a_failure_is_told_alone() -> None:
    def blaming(name: str, finding: Finding) -> Check:
        return Check("subject", name, lambda setup: finding, blames=("fine", "wrong"))

    fails, works = bad("fails too", "mend it"), good("works in spite of that")
    checks = [*TREE[:2], blaming("fails", fails), blaming("works", works)]
    findings = {check.name: finding for check, finding in run_checks(checks, Setup())}
    assert findings["fails"] == not_tried("needs: wrong")
    assert findings["works"] == works
    checks[1] = check_that("wrong", good("mended"))
    findings = {check.name: finding for check, finding in run_checks(checks, Setup())}
    assert findings["fails"] == fails


def test_check_that_raises_is_a_finding() -> None:
    def examine(setup: Setup) -> Finding:
        raise ZeroDivisionError("twice")

    ((_, finding),) = run_checks([Check("subject", "raises", examine)], Setup())
    assert finding.status is Status.BAD
    assert "ZeroDivisionError: twice" in finding.found
    assert "report it with the output" in finding.remedy


def test_control_characters_of_others_are_shown() -> None:
    checks = [check_that("says", bad("host \x1b[2J:", "see\a", "ssh \x9b"))]
    ((_, finding),) = run_checks(checks, Setup())
    assert finding == bad(r"host \x1b[2J:", r"see\x07", r"ssh \x9b")


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):  # as in a pipe
        monkeypatch.delenv(name, raising=False)
    long = "so much is wrong that it does not fit into a line " * 3
    rows = [*run_checks(TREE, Setup()), (check_that("long", good("")), bad(long, "do [this]"))]
    assert report.show({"Python": "3.12 [x]"}, rows) == rows
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["Python", "3.12", "[x]"]
    table = lines[lines.index("subject") + 1 :]
    assert [" ".join(line.split()) for line in table[:7]] == [
        "✓ fine here",
        "✗ wrong not here",
        "→ put it there",
        "✓ after fine too",
        "– 2 more needs: wrong (after wrong, after that)",  # noqa: RUF001
        "– not for us no such thing here",  # noqa: RUF001
        "– after not for us needs: not for us",  # noqa: RUF001
    ]
    assert " ".join(" ".join(table[7:-2]).split()) == f"✗ long {long}→ do [this]"
    assert table[-1] == "2 good, 2 bad, 4 not tried"
    assert max(map(len, lines)) <= 100


def test_command_is_one_line_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    command = "pip install 'somewhere/where the path is long' " * 4
    report.show({}, [(check_that("wrong", good("")), bad("not here", "put it there", command))])
    lines = capsys.readouterr().out.splitlines()
    assert f"{' ' * 29}$ {command}" in lines


def test_command_prints_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chainermn.doctor.command.CHECKS", TREE)
    monkeypatch.setattr(report, "versions", lambda: {"host": "h1"})
    shown = CliRunner().invoke(doctor, [])
    assert shown.exit_code == 1
    assert shown.output.startswith("  host")
    assert shown.output.endswith("\n2 good, 1 bad, 4 not tried\n")
    monkeypatch.setattr("chainermn.doctor.command.CHECKS", TREE[:1])
    shown = CliRunner().invoke(doctor, [])
    assert shown.exit_code == 0
    assert shown.output.endswith("\n1 good, 0 bad, 0 not tried\n")


def test_marks_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    findings = [good("here"), bad("not here", "put it there"), not_tried("later")]
    report.show({}, [(check_that(str(one.status), one), one) for one in findings])
    lines = shown.getvalue().decode().splitlines()[2:6]
    assert [line[:1] for line in lines] == ["+", "x", " ", "-"]
    assert lines[2].strip() == "-> put it there"


def test_terminal_keeps_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "50")
    report.show({}, [(check_that("long", good("so many words " * 9)), good("so many words " * 9))])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(re.sub("\x1b.*?m", "", line).rstrip()) for line in lines) <= 50


@pytest.mark.parametrize("number", ["25.6M", "nan", "inf", "0", "-3"])
def test_parameters_that_are_no_number(number: str) -> None:
    shown = CliRunner().invoke(doctor, ["--parameters", number])
    assert shown.exit_code == 2
    assert "expected a number of at least 1, such as 25.6e6, got" in shown.output


def test_json() -> None:
    rows = list(run_checks(TREE[:2], Setup()))
    assert json.loads(report.as_json({"Python": "3.12"}, rows)) == {
        "versions": {"Python": "3.12"},
        "checks": [
            {
                "subject": "subject",
                "name": "fine",
                "status": "good",
                "found": "here",
                "remedy": "",
                "command": "",
            },
            {
                "subject": "subject",
                "name": "wrong",
                "status": "bad",
                "found": "not here",
                "remedy": "put it there",
                "command": "",
            },
        ],
    }
