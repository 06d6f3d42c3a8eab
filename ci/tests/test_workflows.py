"""The workflows run only pinned code of others, and cannot write to the repository.

Workflows on your own machines do not run the code of strangers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


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


def jobs(workflow: str) -> dict[str, str]:
    """Return the text of each job."""
    _, _, text = workflow.partition("\njobs:\n")
    return dict(re.findall(r"^  ([\w-]+):.*\n((?: {4}.*\n|\n)*)", text, re.MULTILINE))


def sessions() -> set[str]:
    """Return the names of nox's sessions."""
    declared = r"^@nox\.session.*\n(?:@.*\n)*def (\w+)"
    return set(re.findall(declared, (ROOT / "noxfile.py").read_text(), re.MULTILINE))


def called(workflow: str) -> list[str]:
    """Return the names of the sessions that a workflow runs."""
    return re.findall(r"\./noxw -(?:s |k \")([\w-]+)", workflow)


def test_sessions_are_there(workflow: str) -> None:
    assert len(called(workflow)) == workflow.count("./noxw")
    assert set(called(workflow)) <= sessions()


def test_sessions_of_tests_run_somewhere() -> None:
    tests = {name for name in sessions() if name.endswith(("_tests", "_rehearsal"))}
    run = {name for path in WORKFLOWS for name in called(path.read_text())}
    # It needs a mirror of Debian and Python 3.11: run it by hand after changes.
    assert tests - run == {"image_tests"}


def test_jobs_end(workflow: str) -> None:
    assert [
        name for name, text in jobs(workflow).items() if "\n    timeout-minutes: " not in text
    ] == []


def test_own_machines_run_sessions_only_by_hand_and_at_night() -> None:
    """Otherwise anyone with a pull request could run code there that outlives the job."""
    found = {path.name: path.read_text() for path in WORKFLOWS}
    assert [name for name, text in found.items() if "self-hosted" in text] == ["runners.yml"]
    workflow = found["runners.yml"]
    _, _, triggers = workflow.partition("\non:\n")
    assert re.findall(r"^  (\w+):", triggers.partition("\npermissions:")[0], re.MULTILINE) == [
        "schedule",
        "workflow_dispatch",
    ]
    for steps in jobs(workflow).values():
        commands = re.findall(r"\brun: (.+)", steps)
        assert [command for command in commands if not command.startswith("./noxw -s ")] == []


def test_each_job_on_an_own_machine_has_a_label_and_conditions_of_its_name() -> None:
    workflow = (ROOT / ".github/workflows/runners.yml").read_text()
    (choices,) = re.findall(r"options: \[(.+)\]", workflow)
    assert list(jobs(workflow)) == choices.split(", ")
    for name, text in jobs(workflow).items():
        (condition,) = re.findall(r"if:(?: >-)?(.+?)\n    runs-on", text, re.DOTALL)
        assert " ".join(condition.split()) == (
            f"inputs.job == '{name}' || "
            f"!inputs.job && contains(fromJSON(vars.RUNNERS || '[]'), '{name}')"
        )
        assert f"\n    runs-on: [self-hosted, {name}]\n" in text
