"""``chainermn launch``: real jobs, restarts, signals, and what it refuses."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from chainermn.__main__ import main
from chainermn.launch.mpiexec import find_mpiexec, mpi_flavor
from chainermn.version import VERSION

pytestmark = pytest.mark.each_mpi

# Seconds after which something must have hung, even on a busy machine.
LIMIT = 120
# Each rank writes a file that shows what it was given.
WRITES = """\
import os, pathlib, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
text = repr((world.size, sys.argv[2:], os.environ.get("CHAINERMN_STALL_LIMIT"), sys.executable))
pathlib.Path(sys.argv[1], f"rank{world.rank}").write_text(text)
"""


def launch(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chainermn", "launch", *map(str, arguments)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, **options
    )


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["launch", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["script", "script without suffix", "module"])
def test_ranks_get_program_and_arguments(kind: str, tmp_path: Path) -> None:
    name = "writes" if kind == "script without suffix" else "writes.py"
    (tmp_path / name).write_text(f"#!/usr/bin/env python3\n{WRITES}")
    program = ["-m", "writes"] if kind == "module" else [name]
    limit = ["--stall-limit", "2.5"]
    result = launch("-n", 2, *limit, *program, tmp_path, "-n", "9", "--max-restarts", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    expected = repr((2, ["-n", "9", "--max-restarts"], "2.5", sys.executable))
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [expected] * 2


def test_any_command(tmp_path: Path) -> None:
    result = launch("-n", 2, "touch", tmp_path / "touched")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "touched").exists()


# For one rank only, because two would count each attempt twice.
FAILS_AT_FIRST = """\
import pathlib, sys
attempts = pathlib.Path(sys.argv[1])
number = len(list(attempts.iterdir()))
(attempts / str(number)).touch()
sys.exit(0 if number == 2 else 7)
"""


@pytest.mark.parametrize(("restarts", "attempts", "code"), [(0, 1, 7), (1, 2, 7), (4, 3, 0)])
def test_restarts(restarts: int, attempts: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS_AT_FIRST)
    folder = tmp_path / "attempts"
    folder.mkdir()
    result = launch("-n", 1, "--max-restarts", restarts, script, folder)
    assert result.returncode == code
    assert len(list(folder.iterdir())) == attempts
    notices = [
        f"chainermn launch: attempt {attempt} of {restarts + 1} ended with exit code 7; "
        "starting again"
        for attempt in range(1, attempts)
    ]
    assert [line for line in result.stderr.splitlines() if "chainermn launch" in line] == notices


WAITS = """\
import pathlib, sys
from mpi4py import MPI
pathlib.Path(sys.argv[1], f"rank{MPI.COMM_WORLD.rank}").touch()
MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.rank)
"""

# Has less patience with ranks inside MPI, and handles SIGINT even if its parent ignores it.
IMPATIENT = """\
import signal
from chainermn.__main__ import main
from chainermn.launch import restarts
signal.signal(signal.SIGINT, signal.default_int_handler)
restarts.PATIENCE = 0.2
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_job(
    number: signal.Signals,
    started: Any,
    wait_until: Callable[[Callable[[], bool]], bool],
    tmp_path: Path,
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    arguments = ["launch", "-n", "2", "--max-restarts", "5", str(script), str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *arguments],
        env=started.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "starting again" not in stderr
    assert wait_until(lambda: not started.processes()), started.processes()


def test_dry_run_prints_what_a_shell_can_run(tmp_path: Path) -> None:
    script = tmp_path / "writes it.py"
    script.write_text(WRITES)
    printed = invoke("-np", 2, "--stall-limit", 8, "--dry-run", script, tmp_path, "a b").output
    assert not list(tmp_path.glob("rank*"))
    subprocess.run(printed, shell=True, check=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [
        repr((2, ["a b"], "8", sys.executable))
    ] * 2


def test_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a cpu=2  # as ChainerMN 1 wrote it\nb:2\n")
    for name in os.environ:
        if name.startswith("CHAINER"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FOO", "bar")
    monkeypatch.setenv("CHAINER_SEED", "0")
    places = {"mpich": ["-hosts", "a:2,b:1"], "openmpi": ["--host", "a:2,b:1"]}[mpi_flavor()]
    names = ["FOO", "CHAINERMN_STALL_LIMIT", "CHAINER_SEED"]
    exports = [f"-x {name}" for name in names] if mpi_flavor() == "openmpi" else []
    expected = [str(find_mpiexec()), *places, *shlex.split(" ".join(exports)), "-n", "3"]
    for where in (["--hostfile", hostfile], ["--host", "a:2,b:2"]):
        options = ["--forward", "FOO", "--stall-limit", 9, "--dry-run"]
        printed = invoke("-n", 3, *where, *options, "hostname")
        assert printed.exit_code == 0, printed.output
        words = shlex.split(printed.output)
        assert "CHAINERMN_STALL_LIMIT=9" in words
        start = words.index(expected[0])
        assert words[start : start + len(expected)] == expected
    assert "-n 4" in invoke("--hostfile", hostfile, "--dry-run", "hostname").output


WRONG = {
    "no ranks": (["hostname"], "give the number of ranks, as in -n 4"),
    "no program": (["-n", "2"], "Missing argument"),
    "too many ranks": (["-n", "3", "--host", "a:2", "hostname"], "3 ranks do not fit"),
    "both lists": (["--host", "a", "--hostfile", "{hosts}", "hostname"], "either --host or"),
    "wrong list": (["--host", "a:x", "hostname"], "expected a host such as a:2"),
    "no hostfile": (["--hostfile", "/nowhere", "hostname"], "No such file"),
    "no script": (["-n", "2", "nothing.py"], "nothing.py: neither a script"),
    "no program of its own": (["-n", "2", "{hosts}"], "hosts is not executable; try: chmod +x "),
    "another program": (
        ["-n", "1", "hostname", ":", "-n", "1", "hostname"],
        "mpiexec starts another program after an argument ':'",
    ),
    "no variable": (["-n", "2", "--forward", "NOT_SET", "hostname"], "--forward NOT_SET"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\n")
    arguments, message = WRONG[case]
    result = invoke(*(argument.format(hosts=tmp_path / "hosts") for argument in arguments))
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_mpiexec_of_another_mpi_is_refused(
    flavor: str, only_mpiexec: Callable[[str], Path]
) -> None:
    only_mpiexec("echo " + {"mpich": "Open MPI", "openmpi": "HYDRA"}[flavor])
    for options in (["-n", 2], ["--host", "localhost:2", "--min-ranks", 2]):
        result = invoke(*options, sys.executable)
        assert result.exit_code == 1
        assert "put the mpiexec of that MPI on PATH" in " ".join(result.output.split())


def test_command_starts_where_chainer_compat_is_off() -> None:
    code = "import chainermn_command; chainermn_command.main()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        env={**os.environ, "CHAINER_COMPAT_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    expected = f"chainermn, version {VERSION}\n"
    assert (shown.returncode, shown.stdout) == (0, expected), shown.stderr


def test_launching_imports_neither_chainer_nor_rich() -> None:
    code = (
        "import sys, chainermn.__main__\n"
        "assert not {'chainer', 'rich', 'mpi4py', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
