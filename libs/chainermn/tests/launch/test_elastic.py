"""Jobs that are restarted on other hosts, with real ranks and with an mpiexec that hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chainermn.__main__ import main
from chainermn.launch import elastic, job, membership
from chainermn.launch.elastic import run_elastic
from chainermn.launch.hosts import Host
from chainermn.launch.reachable import HostState

# Seconds after which something must have hung, even on a busy machine.
LIMIT = 120


def launch(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "chainermn", "launch", *map(str, arguments)]


def notices(text: str) -> list[str]:
    begin = "chainermn launch: "
    return [line.removeprefix(begin) for line in text.splitlines() if line.startswith(begin)]


# Prints the hosts from the file `hosts`, which an attempt may replace.
DISCOVER = "#!/bin/sh\ncat {folder}/hosts\n"
# In the first attempt, one of three ranks takes a place away from the hosts, then fails.
FAILS_ON_THREE = """\
import pathlib, sys
import chainermn
comm = chainermn.create_communicator("naive")
folder = pathlib.Path(sys.argv[1])
(folder / f"{comm.size}.{comm.rank}").touch()
comm.allgather_obj(None)
if comm.size == 3:
    if comm.rank == 1:
        (folder / "hosts").write_text("localhost:2\\n")
        raise RuntimeError("by design")
    comm.recv_obj(1)
"""


@pytest.mark.each_mpi
def test_job_goes_on_with_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_ON_THREE)
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    discover = tmp_path / "discover"
    discover.write_text(DISCOVER.format(folder=tmp_path))
    discover.chmod(0o755)
    options = ["--min-ranks", 2, "--max-restarts", 10, "--discover", discover]
    ended = subprocess.run(
        launch(*options, tmp_path / "train.py", tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    expected = ["2.0", "2.1", "3.0", "3.1", "3.2"]
    assert sorted(path.name for path in tmp_path.glob("[0-9].*")) == expected
    assert "RuntimeError: by design" in ended.stderr
    first, failed, second = notices(ended.stderr)
    assert first == "attempt 1 of 11: 3 ranks on localhost:3"
    # The script has failed, not the host.
    assert re.fullmatch(r"attempt 1 of 11 ended with exit code \d+", failed)
    assert second == "attempt 2 of 11: 2 ranks on localhost:2"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGUSR1, 75)]
)
def test_signal_while_there_are_too_few_hosts(
    started: Any,
    wait_until: Callable[[Callable[[], bool]], bool],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            launch("--host", "localhost:1", "--min-ranks", 2, "hostname"),
            env=started.environment,
            stdin=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    assert wait_until(lambda: "waiting up to 600 s" in said.read_text())
    process.send_signal(number)
    assert process.wait(LIMIT) == code
    is_told = "stopped by SIGUSR1 while no attempt ran" in said.read_text()
    assert is_told == (number == signal.SIGUSR1)
    assert not started.processes()


def run(script: str, hosts: list[Host], max_restarts: int = 0, **variables: str) -> int:
    def make_command(
        hosts: list[Host], given: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        return ["/bin/sh", "-c", script], {**os.environ, **given, **variables}

    return run_elastic(
        make_command,
        lambda: hosts,
        sys.executable,
        min_ranks=1,
        max_ranks=None,
        max_restarts=max_restarts,
        patience=0.0,
    )


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, HostState]:
    """Return the states of all hosts, which tests may change."""
    of_all = {name: HostState("", f"{name}.example.org") for name in ("a", "b", "c")}
    monkeypatch.setattr(elastic, "examine_hosts", lambda *arguments: dict(of_all))
    monkeypatch.setattr(elastic, "unreachable", lambda names: {})
    return of_all


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the hosts that are said to be the cause when an attempt fails."""
    hosts: list[str] = []
    monkeypatch.setattr(
        membership.Membership,
        "note_failure",
        lambda _, names, culprits, seconds: hosts.extend(culprits),
    )
    return hosts


HOSTS = [("a", 1), ("b", 1), ("c", 1)]


def test_exit_codes_and_restarts(
    states: dict[str, HostState], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = f"echo >>{tmp_path}/attempts; test $(wc -l <{tmp_path}/attempts) -ge"
    assert run(f"{counts} 3 || exit 7", HOSTS, 1) == 7
    assert run(f"{counts} 3 || exit 7", HOSTS, 1) == 0
    assert len((tmp_path / "attempts").read_text()) == 3
    said = "attempt 1 of 2: 3 ranks on a:1,b:1,c:1", "attempt 1 of 2 ended with exit code 7"
    assert tuple(notices(capfd.readouterr().err)[:2]) == said


@pytest.mark.parametrize(
    "words", ["Ending the whole job.", "and therefore will terminate the job."]
)
def test_success_after_a_loss_is_none(
    states: dict[str, HostState], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"echo >>{tmp_path}/attempts; test -e {tmp_path}/again && exit"
    assert run(f"{script}; touch {tmp_path}/again; echo '{words}' >&2", HOSTS, 3) == 0
    assert len((tmp_path / "attempts").read_text()) == 2
    assert "attempt 1 of 4 ended with exit code 70" in notices(capfd.readouterr().err)


ENDING = "Ending the whole job."
KILLED = "prterun noticed that process rank 1 with PID 9 on node b exited on"


@pytest.mark.parametrize(
    ("lines", "culprit"),
    [
        ("chainermn: rank 1 on b.example.org (process 5) disappeared first", "b"),
        ("chainermn: rank 1 on b (process 5) has been silent for 9 s: it is stopped, or its", "b"),
        ("chainermn: nothing has come from a.example.org for 6 s. Reported by rank 1 on b", "a"),
        ("chainermn: of the 4 ranks on b, all except 1 ended before create_communicator", "b"),
        ("chainermn: the process that watches over the job on a has been killed. Reported", "a"),
        ("prterun noticed that process rank 1 with PID 9 on node b exited on", "b"),
        ("chainermn: rank 2 of 3 on c.example.org failed; ending the whole job. ", ""),
        ("chainermn: rank 0 on a has ended its script, or called sys.exit, while others", ""),
        ("chainermn: rank 0 on a has waited for 6 s in create_communicator for ranks", ""),
        ("chainermn: rank 0 on a ended its script 9 s ago. If the others are meant", ""),
        ("chainermn: note: 4 ranks share 2 cores on a: they take turns", ""),
        ("chainermn: rank 0 on elsewhere (process 5) disappeared first", ""),
        ("an error on b", ""),
        # It does not matter which ranks are ended as a result.
        (f"chainermn: rank 2 of 3 on c failed; {ENDING}\n{KILLED}", ""),
        (f"chainermn: these ranks wait for each other:\n{ENDING}\n{KILLED}", ""),
    ],
)
def test_host_that_is_named(
    lines: str,
    culprit: str,
    states: dict[str, HostState],
    blamed: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(f"echo '{lines}' >&2; exit 3", HOSTS, 1) == 3
    assert blamed == ([culprit] if culprit else [])
    assert lines in capfd.readouterr().err


def test_host_that_cannot_be_used_any_more(
    states: dict[str, HostState],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = membership.Membership.choose

    def choose(self: membership.Membership) -> Any:
        chosen = really(self)
        states["b"] = HostState("gone")
        return chosen

    monkeypatch.setattr(membership.Membership, "choose", choose)
    assert run("exit 4", HOSTS, 1) == 4
    assert notices(capfd.readouterr().err) == [
        "attempt 1 of 2: 3 ranks on a:1,b:1,c:1",
        "attempt 1 of 2 ended with exit code 4; b: gone",
        "attempt 2 of 2: 2 ranks on a:1,c:1; b: gone",
        "attempt 2 of 2 ended with exit code 4",
    ]


@pytest.mark.parametrize("is_said", [True, False])
def test_mpiexec_that_waits_for_a_host_that_is_gone(
    is_said: bool,
    states: dict[str, HostState],
    started: Any,
    wait_until: Callable[[Callable[[], bool]], bool],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = {} if is_said else {"b": "gone"}
    monkeypatch.setattr(elastic, "unreachable", lambda names: gone)
    seconds = {"PERIOD": 0.05, "PERIOD_OF_HOSTS": 0.1, "GRACE": 0.2, "PATIENCE": 0.2}
    for name, value in seconds.items():
        monkeypatch.setattr(elastic, name, value)
    monkeypatch.setattr(job, "PATIENCE", 0.2)
    # An mpiexec that ignores SIGTERM and, in one of the cases, does not end what it has started.
    program = "exec sleep 86400" if is_said else "sleep 86400 & wait; wait"
    script = f"echo '{'Ending the whole job.' * is_said}' >&2; trap '' TERM; {program}"
    variables = {**started.environment, "CHAINERMN_STALL_LIMIT": "0.1"}
    variables.pop(elastic.MARK, None)
    assert run(script, HOSTS, **variables) == 128 + signal.SIGKILL
    said = "the job is over, but mpiexec is still running; ending it"
    assert said in notices(capfd.readouterr().err)
    assert wait_until(lambda: not started.processes()), started.processes()


@pytest.mark.parametrize(
    ("name", "names", "listed"),
    [
        ("10.0.0.2", ["10.0.0.1", "10.0.0.2"], "10.0.0.2"),
        ("10.0.0.3", ["10.0.0.1", "b"], ""),
        ("gpu.b", ["gpu.a", "gpu.b"], "gpu.b"),
        ("gpu", ["gpu.a", "gpu.b"], ""),
        ("gpu", ["cpu.a", "gpu.a"], "gpu.a"),
        ("a.example.org", ["cpu", "a"], "a"),
    ],
)
def test_host_is_found_under_the_name_that_it_gives_itself(
    name: str, names: list[str], listed: str, states: dict[str, HostState], blamed: list[str]
) -> None:
    states.update({each: HostState("") for each in names})
    line = f"chainermn: rank 1 on {name} (process 5) disappeared first"
    assert run(f"echo '{line}' >&2; exit 3", [(each, 1) for each in names], 1) == 3
    assert blamed == ([listed] if listed else [])


WRONG = {
    "no hosts": (["--min-ranks", "2"], "--min-ranks needs --host, --hostfile or --discover"),
    "both": (["--discover", "true", "--host", "a"], "either hosts or --discover, not both"),
    "too few": (["-n", "1", "--host", "a", "--min-ranks", "2"], "-n 1 is less than --min-ranks 2"),
    "no script": (["--discover", "nothing.sh"], "nothing.sh: neither a script"),
    "dry": (["--discover", "false", "--dry-run"], "false ended with exit code 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    arguments, message = WRONG[case]
    result = CliRunner().invoke(main, ["launch", *arguments, "hostname"])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def dry_run(hosts: str, *options: str) -> str:
    Path("discover.py").write_text(f"print({hosts!r})")
    words = ["launch", *options, "--discover", "discover.py", "--dry-run", "hostname"]
    printed = CliRunner().invoke(main, words)
    assert (printed.exit_code == 0) == bool(hosts), printed.output
    return printed.output


def test_dry_run_asks_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "localhost:2 -n 2" in dry_run("localhost:2")
    assert "localhost:1 -n 1" in dry_run("localhost:2", "-n", "1")
    # As in a run, -n gives the largest number of ranks.
    assert "localhost:2 -n 2" in dry_run("localhost:2", "-n", "8")
    assert "no host" in dry_run("")
