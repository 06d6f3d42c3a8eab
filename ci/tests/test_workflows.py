"""The workflows run only code of others that is pinned, and may not write to the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).resolve().parents[2] / ".github/workflows").glob("*.yml"))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text())


def test_there_are_workflows() -> None:
    assert WORKFLOWS


def test_actions_are_pinned_by_digest_with_their_version(workflow: str) -> None:
    used = re.findall(r"\buses: *(.+)", workflow)
    assert used
    pin = re.compile(r"[\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert [action for action in used if not pin.fullmatch(action)] == []


def test_jobs_may_only_read(workflow: str) -> None:
    permissions = re.findall(r"^( *)permissions:(.*\n(?:\1 +.*\n)*)", workflow, re.MULTILINE)
    assert permissions == [("", "\n  contents: read\n")]


def test_checkouts_leave_no_credentials_to_the_code_that_runs_after_them(workflow: str) -> None:
    checkouts = re.findall(r"uses: actions/checkout@.*\n(.*)\n", workflow)
    assert {line.strip() for line in checkouts} == {"with: {persist-credentials: false}"}
