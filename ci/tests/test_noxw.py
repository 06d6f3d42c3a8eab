"""noxw on machines of all sorts: it runs nox, or says in one line why it cannot."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = "ci/constraints/nox.txt"
NOXFILE = """
import nox

@nox.session
def echo(session):
    print("got", session.posargs)

@nox.session
def fail(session):
    session.error("as asked")
"""


@pytest.fixture(scope="module")
def offline() -> dict[str, str]:
    """Return an environment in which pip finds nox without a network."""
    wheels = os.environ.get("CHAINERMN_WHEELHOUSE")
    if wheels is None:
        pytest.skip("CHAINERMN_WHEELHOUSE names no wheels; nox -s install_tests sets it")
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": Path(wheels).as_uri()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a fresh checkout, in a folder with a space in its name."""
    root = tmp_path / "a checkout"
    root.mkdir()
    (root / LOCK).parent.mkdir(parents=True)
    for name in ("noxw", LOCK):  # the copies are writable, even if the originals are not
        shutil.copyfile(ROOT / name, root / name)
    (root / "noxfile.py").write_text(NOXFILE)
    return root


def command(checkout: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(checkout / "noxw"), "--no-venv", *arguments]


def noxw(
    checkout: Path, *arguments: str, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(checkout, *arguments), env=env, cwd=cwd, capture_output=True, text=True
    )


def as_if_python_were(
    version: tuple[int, ...], checkout: Path, *arguments: str, path: Path
) -> subprocess.CompletedProcess[str]:
    """Run noxw on a Python that calls itself `version`, with only `path` on PATH."""
    lines = [
        "import runpy, sys",
        f"sys.version_info = {version}",
        f"sys.argv = {[str(checkout / 'noxw'), *arguments]}",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
    )


def only_error(result: subprocess.CompletedProcess[str]) -> str:
    """Check that noxw failed with one line, and return this line."""
    assert result.returncode == 2
    *before, error = result.stderr.splitlines()
    assert before in ([], ["noxw: installing nox into .noxw (first run only)"])
    assert error.startswith("noxw: ")
    return error


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def modules_missing(folder: Path, *names: str) -> dict[str, str]:
    """Return settings under which these modules cannot be imported."""
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ImportError('no {name}')")
    return {"PYTHONPATH": str(folder)}


def installed(checkout: Path) -> list[str]:
    return [path.name for path in (checkout / ".noxw").glob("*")]


@pytest.mark.venv
def test_installs_once_and_passes_on_arguments_and_exit_code(
    checkout: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    first = noxw(checkout, "-s", "echo", "--", "-k", "b c", env=offline, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "got ['-k', 'b c']" in first.stdout
    assert first.stderr.count("noxw: installing nox into .noxw") == 1

    second = noxw(checkout, "-s", "fail", env={**offline, "PIP_FIND_LINKS": ""}, cwd=checkout)
    assert second.returncode == 1
    assert "as asked" in second.stderr
    assert "noxw:" not in second.stderr


@pytest.mark.venv
def test_two_at_once(checkout: Path, offline: dict[str, str]) -> None:
    processes = [
        subprocess.Popen(command(checkout, "-s", "echo"), env=offline, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(installed(checkout)) == 1


@pytest.mark.venv
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_runs_after_an_interrupted_installation(
    checkout: Path, offline: dict[str, str], how: signal.Signals
) -> None:
    with subprocess.Popen(
        command(checkout, "-s", "echo"),
        env=offline,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Python ignores interrupts if its parent does, as in a background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert "installing" in process.stderr.readline()
        while not list(checkout.glob(".noxw/building-*/pyvenv.cfg")):
            assert process.poll() is None
        os.killpg(process.pid, how)
        said = process.stderr.read()
    assert said == ("noxw: interrupted\n" if how == signal.SIGINT else "")
    assert not any(name.startswith("nox-") for name in installed(checkout))

    again = noxw(checkout, "-s", "echo", env=offline)
    assert again.returncode == 0, again.stderr


@pytest.mark.venv
def test_without_a_network(checkout: Path, tmp_path: Path, offline: dict[str, str]) -> None:
    error = only_error(noxw(checkout, env={**offline, "PIP_FIND_LINKS": str(tmp_path)}))
    assert "check the network" in error
    assert "No matching distribution found for " in error
    assert installed(checkout) == []


@pytest.mark.venv
def test_installs_another_nox_when_the_pin_changes(
    checkout: Path, offline: dict[str, str]
) -> None:
    assert noxw(checkout, "-s", "echo", env=offline).returncode == 0
    lock = checkout / LOCK
    lock.write_text(lock.read_text().replace("\nnox==", "\nnox==1!"))
    assert "nox==1!" in only_error(noxw(checkout, "-s", "echo", env=offline))


@pytest.mark.venv
def test_refuses_a_file_with_another_hash(checkout: Path, offline: dict[str, str]) -> None:
    lock = checkout / LOCK
    lock.write_text(re.sub("sha256:.{8}", "sha256:00000000", lock.read_text()))
    error = only_error(noxw(checkout, "-s", "echo", env=offline))
    assert "DO NOT MATCH THE HASHES" in error
    assert installed(checkout) == []


def test_without_its_lock(checkout: Path) -> None:
    (checkout / LOCK).unlink()
    assert f"cannot read {checkout / LOCK}" in only_error(noxw(checkout, env=os.environ))


@pytest.mark.venv
def test_without_ensurepip_takes_the_systems_pip(
    checkout: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    pytest.importorskip("pip")
    result = noxw(
        checkout, "-s", "echo", env={**offline, **modules_missing(tmp_path, "ensurepip")}
    )
    assert result.returncode == 0, result.stderr


def test_without_ensurepip_and_pip_names_the_package(checkout: Path, tmp_path: Path) -> None:
    missing = modules_missing(tmp_path, "ensurepip", "pip")
    error = only_error(noxw(checkout, env={**os.environ, **missing}))
    assert f"apt install python3.{sys.version_info.minor}-venv" in error


def test_in_a_folder_that_cannot_be_written(checkout: Path) -> None:
    (checkout / ".noxw").touch()
    assert f"cannot write to {checkout}" in only_error(noxw(checkout, env=os.environ))


def test_old_python_alone(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path / "python3.14", "exit 127")  # a version manager's stub for a missing Python
    error = only_error(as_if_python_were((3, 8, 10), checkout, path=tmp_path))
    assert "needs Python 3.11 or newer, this is 3.8" in error


def test_old_python_beside_newer_ones(checkout: Path, tmp_path: Path) -> None:
    script(tmp_path / "python3.14", "exit 127")
    script(tmp_path / "python3.12", 'echo 3.12 "$@"')
    script(tmp_path / "python3.11", 'echo 3.11 "$@"')
    result = as_if_python_were((3, 8, 10), checkout, "-s", "mnist", path=tmp_path)
    assert result.stdout == f"3.12 {checkout / 'noxw'} -s mnist\n"


def test_old_pythons_can_read_it() -> None:
    """They get as far as saying that they are too old; at night, this runs them."""
    tree = ast.parse((ROOT / "noxw").read_bytes(), feature_version=(3, 4))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:  # nor what Python 2.7 lacks
        arguments = function.args.args
        assert not (function.args.kwonlyargs or function.returns), function.name
        assert [each.arg for each in arguments if each.annotation] == [], function.name


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["python2.7", "python3.6", "python3.8", "python3.10"])
def test_on_an_old_python_of_this_machine(checkout: Path, tmp_path: Path, python: str) -> None:
    ask = [python, "-c", "import sys; print(sys.executable)"]
    try:
        executable = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no {python} here")
    result = subprocess.run(
        [executable, str(checkout / "noxw")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert f"this is {python.removeprefix('python')}" in only_error(result)
