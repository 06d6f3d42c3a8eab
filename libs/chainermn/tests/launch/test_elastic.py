"""Jobs that are restarted on other hosts, with real ranks and with an mpiexec that hangs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chainermn.__main__ import main
from chainermn.connections.joining import Endpoint
from chainermn.connections.messages import Member, Message
from chainermn.failures.launcher import LAUNCHER, MONITOR
from chainermn.failures.messages import End, Go, Tick
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
    lines = text.replace("\0", "").splitlines()  # Open MPI's mpiexec may end with such a character
    return [line.removeprefix(begin) for line in lines if line.startswith(begin)]


# Prints the hosts from the file `hosts`, which an attempt may replace.
DISCOVER = "#!/bin/sh\ncat {folder}/hosts\n"
# In the first attempt, one of three ranks takes a place away from the hosts, then fails. In the
# second, one of two is killed.
FAILS_TWICE = """\
import os, pathlib, signal, sys
import chainermn
comm = chainermn.create_communicator("naive")
folder = pathlib.Path(sys.argv[1])
attempt = len([*folder.glob("*.0")])
comm.allgather_obj(None)
(folder / f"{attempt}.{comm.rank}").touch()
if attempt < 2:
    if comm.rank == 1:
        (folder / "hosts").write_text("localhost:2\\n")
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("by design")
    comm.recv_obj(1)
"""


@pytest.mark.each_mpi
def test_job_goes_on_with_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_TWICE)
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
    expected = ["0.0", "0.1", "0.2", "1.0", "1.1", "2.0", "2.1"]
    assert sorted(path.name for path in tmp_path.glob("?.?")) == expected
    assert "RuntimeError: by design" in ended.stderr
    first, failed, second, killed, third = notices(ended.stderr)
    assert first == "attempt 1 of 11: 3 ranks on localhost:3"
    # The script has failed, not the host.
    assert re.fullmatch(r"attempt 1 of 11 ended with exit code \d+", failed)
    assert second == "attempt 2 of 11: 2 ranks on localhost:2"
    # Without the host's record, its exit code would be all that is known.
    assert re.fullmatch(r"attempt 2 .* exit code \d+; localhost: named above", killed)
    assert third == "attempt 3 of 11: 2 ranks on localhost:2"


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


def run(
    script: str,
    hosts: list[Host],
    max_restarts: int = 0,
    said: Iterable[Message] = (),
    **variables: str,
) -> int:
    """Run a script as a job; in the first attempt, its monitor has said these messages before."""
    left = [said] if said else []

    def make_command(
        hosts: list[Host], given: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        if left:
            monitor = Endpoint.from_text(given[LAUNCHER]).join(Member(0, MONITOR, "a", 1))
            assert monitor is not None
            for message in left.pop():
                monitor.send(message)
            monitor.close()
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


def test_success_after_a_loss_is_none(
    states: dict[str, HostState], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(f"echo >>{tmp_path}/attempts", HOSTS, 3, [End(None, "")]) == 0
    assert len((tmp_path / "attempts").read_text()) == 2
    assert "attempt 1 of 4 ended with exit code 70" in notices(capfd.readouterr().err)


# What the watch, the except hook and Open MPI print; two lines look like their words.
MESSAGES = """\
chainermn: rank 1 on b.example.org (process 5) disappeared first, without a message: it was killed
chainermn: rank 1 on b (process 5) has been silent for 9 s: it is stopped, or its host
chainermn: nothing has come from a.example.org for 6 s: that host or the network is down.
chainermn: of the 4 ranks on b, all except 1 ended before create_communicator, where rank 1
chainermn: the process that watches over the job on a has been killed. Reported by rank 1 on b.
chainermn: rank 0 on a has waited for 6 s in create_communicator for ranks that have not called it
chainermn: rank 0 on a has ended its script, or called sys.exit, while others wait for it:
chainermn: these ranks wait for each other:
chainermn: interrupted (Ctrl-C): rank 1 of 2 on b was at train.py:7. Ending the whole job.
chainermn: rank 2 of 3 on c.example.org failed; ending the whole job.
Ending the whole job.
prterun noticed that process rank 1 with PID 9 on node b exited on signal 9 (Killed).
and therefore will terminate the job.
Sending the whole job description to the archive
an error on b
"""


@pytest.mark.parametrize("pieces", [1 << 16, 7])
def test_whatever_ranks_print_is_for_people(
    pieces: int,
    states: dict[str, HostState],
    blamed: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    parts = [MESSAGES[at : at + pieces] for at in range(0, len(MESSAGES), pieces)]
    prints = "".join(f"printf %s {shlex.quote(part)} >&2\n" for part in parts)
    # A job whose messages were believed would not end with 0, and the host would be blamed.
    assert run(prints, HOSTS, 1) == 0
    assert run(f"{prints}test -e {tmp_path}/a && exit; touch {tmp_path}/a; exit 3", HOSTS, 1) == 0
    assert blamed == []
    printed = capfd.readouterr().err
    assert printed.count(MESSAGES) == 3
    assert notices(printed) == [
        "attempt 1 of 2: 3 ranks on a:1,b:1,c:1",
        *("attempt 1 of 2: 3 ranks on a:1,b:1,c:1", "attempt 1 of 2 ended with exit code 3"),
        "attempt 2 of 2: 3 ranks on a:1,b:1,c:1",
    ]


@pytest.mark.parametrize(
    ("said", "culprit"),
    [
        ([Tick(), End(None, "", "b.example.org")], "b"),
        ([End(None, "", "b")], "b"),
        ([End(2, "a reason")], ""),
        ([End(None, "", "elsewhere")], ""),
        ([Go()], ""),
        ([Tick()], "a"),  # whoever watched the job has been killed
    ],
)
def test_host_that_is_lost(
    said: list[Message], culprit: str, states: dict[str, HostState], blamed: list[str]
) -> None:
    assert run("exit 3", HOSTS, 1, said) == 3
    assert blamed == ([culprit] if culprit else [])


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
    # Open MPI kills the ranks of the others: "a" is not to blame for that.
    assert run("exit 4", HOSTS, 1, [End(None, "", "a")]) == 4
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
    script = f"trap '' TERM; {program}"
    variables = {**started.environment, "CHAINERMN_STALL_LIMIT": "0.1"}
    variables.pop(elastic.MARK, None)
    messages = [End(None, "")] if is_said else []
    assert run(script, HOSTS, 0, messages, **variables) == 128 + signal.SIGKILL
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
    assert run("exit 3", [(each, 1) for each in names], 1, [End(None, "", name)]) == 3
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
