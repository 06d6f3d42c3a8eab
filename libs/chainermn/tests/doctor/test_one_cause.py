"""Each fault gives one ✗, and typing what the doctor says cures it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import chainermn
from chainermn.doctor.checks import CHECKS
from chainermn.doctor.probe import Outcome
from chainermn.doctor.registry import Check, Status, good, run_checks
from chainermn.doctor.setup import Setup
from chainermn.process import THREAD_VARIABLES

#: A container may have little shared memory, and the doctor is right to say so.
DEPENDS_ON_THE_MACHINE = {"/dev/shm"}
OURS = str(Path(str(chainermn.__file__)).parents[1])
EXAMINE = f"""
import sys
sys.path.insert(0, {OURS!r})  # where chainer-compat is off, chainermn is Chainer's own copy
from chainermn.doctor.checks import CHECKS
from chainermn.doctor.setup import Setup
checks = {{check.name: check for check in CHECKS}}
print(*(checks[name].examine(Setup()).status for name in sys.argv[1:]))
"""

#: A function that breaks something in a folder, and returns environment variables.
Cause = Callable[[Path], dict[str, str]]


def chainer_compat_is_off(folder: Path) -> dict[str, str]:
    return {"CHAINER_COMPAT_DISABLE": "1"}


def chainers_own_copy_is_asked_for(folder: Path) -> dict[str, str]:
    return {"CHAINER_COMPAT_BUNDLED_CHAINERMN": "1"}


def folder_is_here(folder: Path) -> dict[str, str]:
    (folder / "chainermn").mkdir()
    (folder / "chainermn" / "__init__.py").write_text("raise ImportError('of somebody')")
    return {}


def folder_is_on_pythonpath(folder: Path) -> dict[str, str]:
    (folder / "my modules" / "chainermn").mkdir(parents=True)
    (folder / "my modules" / "chainermn" / "__init__.py").touch()
    return {"PYTHONPATH": str(folder / "my modules")}


def numpy_is_broken(folder: Path) -> dict[str, str]:
    return module_is_broken(folder, "numpy")


def chainer_is_broken(folder: Path) -> dict[str, str]:
    return module_is_broken(folder, "chainer")


def dependency_is_broken(folder: Path) -> dict[str, str]:
    return module_is_broken(folder, "threadpoolctl")


def module_is_broken(folder: Path, name: str) -> dict[str, str]:
    path = folder / "modules" / f"{name}.py"
    path.parent.mkdir()
    path.write_text("raise ImportError('spoilt')")
    return {"PYTHONPATH": str(path.parent)}


def mpi4py_is_broken(folder: Path) -> dict[str, str]:
    return {"MPI4PY_MPIABI": "nonsense"}


def another_mpiexec_is_first(folder: Path) -> dict[str, str]:
    return command_is_first(folder, "mpiexec", "echo 'mpiexec (Open MPI) 5.0.8'")


def host_is_unknown(folder: Path) -> dict[str, str]:
    says = "ssh: Could not resolve hostname elsewhere"
    return command_is_first(folder, "ssh", f"echo '{says}' >&2; exit 255")


def command_is_first(folder: Path, name: str, script: str) -> dict[str, str]:
    path = folder / "of others" / name
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:{os.environ['PATH']}"}


def threads_are_refused(folder: Path) -> dict[str, str]:
    return {"MPI4PY_RC_THREAD_LEVEL": "single"}


def threads_are_nonsense(folder: Path) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "abc", "MKL_NUM_THREADS": "0"}


def nothing_is_broken(folder: Path) -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        # Independent faults are tested together.
        ("--host localhost:1", {"chainer-compat": chainer_compat_is_off}),
        (
            "--host localhost:1",
            {"chainer-compat": numpy_is_broken, "mpiexec of that MPI": another_mpiexec_is_first},
        ),
        (
            "--host localhost:1,elsewhere:1",
            {
                "chainermn is this one": chainers_own_copy_is_asked_for,
                "ssh without a password": host_is_unknown,
            },
        ),
        (
            "--script train.py --data images --host localhost:1,127.0.0.1:1",
            {
                "chainermn is this one": folder_is_on_pythonpath,
                "thread level": threads_are_refused,
                "threads": threads_are_nonsense,
                "files": nothing_is_broken,
                "a job over the hosts": nothing_is_broken,
            },
        ),
        ("", {"Chainer computes": chainer_is_broken, "chainermn is this one": folder_is_here}),
        ("", {"chainermn imports": dependency_is_broken, "mpi4py": mpi4py_is_broken}),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_each_cause_is_told_once(
    options: str, causes: dict[str, Cause], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for spoil in causes.values():
        for name, value in spoil(tmp_path).items():
            monkeypatch.setenv(name, value)

    def run(command: str) -> subprocess.CompletedProcess[str]:
        shell = ["sh", "-c", command]
        return subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True)

    python = shlex.join([sys.executable, "-P", "-c"])
    start = shlex.quote("import chainermn_command; chainermn_command.main()")
    shown = run(f"{python} {start} doctor --json {options}")
    assert shown.stderr == ""
    rows = json.loads(shown.stdout)["checks"]
    bad = {row["name"]: row for row in rows if row["status"] == "bad"}
    assert set(bad) - DEPENDS_ON_THE_MACHINE == set(causes), [row["found"] for row in bad.values()]
    assert all(row["remedy"] for row in bad.values())

    # test_typed_remedies.py tests commands that install packages from an index.
    typed = [
        name for name in causes if bad[name]["command"] and " install " not in bad[name]["command"]
    ]
    typed = [name for name in typed if name != "ssh without a password"]
    if typed:
        examine = f"{python} {shlex.quote(EXAMINE)} {shlex.join(typed)}"
        remedies = "; ".join(bad[name]["command"] for name in typed)
        assert run(f"{remedies}; {examine}").stdout.split() == ["good"] * len(typed)


def test_too_little_shared_memory_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    setup = Setup(outcomes={"ranks": Outcome(failure="crashed with SIGBUS")})
    fine = [
        Check("Python", name, lambda setup: good("fine"))
        for name in ("Chainer computes", "chainermn imports")
    ]
    checks = [*fine, *(check for check in CHECKS if check.subject == "MPI")]
    findings = {check.name: finding for check, finding in run_checks(checks, setup)}
    assert [name for name in findings if findings[name].status is Status.BAD] == ["/dev/shm"]
    for name in ("two ranks", "thread level", "shared memory", "all-reduce"):
        assert findings[name].found == "needs: /dev/shm"
