"""Hosts vanish and return, and ``chainermn launch`` continues on those that are there."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ci.multinode.conftest import skip_unless_emulated
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job

SCRIPTS = Path(__file__).resolve().parent / "scripts"
SEED = int(os.environ.get("CHAINERMN_RANDOM_SEED", "0"))
CHECKPOINT = 5
# Prevents waiting forever; a machine that is only slow does not reach it.
TIMEOUT = 600.0
# Prints all hosts, with another one first each time: rank 0 may be on any host.
DISCOVER = """\
#!/bin/sh
echo >>{folder}/asked
n=$(($(wc -l <{folder}/asked) % {size}))
set -- {names}
while [ $n -gt 0 ]; do first=$1; shift; set -- "$@" "$first"; n=$((n - 1)); done
for host; do echo "$host slots=1"; done
"""
# When the link goes down, ends all processes except the first and the sshd.
POWER_OFF = """
touch /run/armed
while ip -brief link show eth0 | grep -q ' UP '; do sleep 0.1; done
for entry in /proc/[0-9]*; do
    pid=${entry#/proc/}
    case $pid in 1|$$|$(cat /run/sshd.pid)) ;; *) kill -KILL $pid 2>/dev/null ;; esac
done
"""


class Event(NamedTuple):
    """An event that `train_elastic.py` has recorded."""

    kind: str
    iteration: int
    epoch: float
    hosts: list[str]


class Loss(NamedTuple):
    """A host that vanished, and what that cost."""

    #: Its name and its rank.
    host: str
    how: str
    ranks: int
    ranks_after: int
    #: Time until the first step of the next attempt.
    seconds: float
    steps: int


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder that emulated hosts share."""
    # If the test fails, the job may still be writing.
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


class Elastic:
    """A job that trains on the hosts that are there."""

    def __init__(self, hosts: Hosts, folder: Path, start: Callable[..., Job]) -> None:
        self._hosts, self._folder = hosts, folder
        discover = folder / "discover"
        values = {"folder": folder, "names": " ".join(hosts.names), "size": len(hosts.names)}
        discover.write_text(DISCOVER.format(**values))
        discover.chmod(0o755)
        options = ["--min-ranks", "2", "--max-restarts", "60", "--stall-limit", "6"]
        if "PYTHONPATH" in os.environ:  # Open MPI does not pass it on
            options += ["--forward", "PYTHONPATH"]
        launch = [sys.executable, SCRIPTS / "launch_elastic.py", "launch", *options]
        train = ["--discover", discover, SCRIPTS / "train_elastic.py", folder]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.job = start([*map(str, launch), *map(str, train)], env=environment)

    def events(self) -> list[Event]:
        """Return what has happened so far."""
        file = self._folder / "progress"
        lines = file.read_text().splitlines() if file.exists() else []
        found = []
        for line in lines:
            try:
                found.append(Event(*json.loads(line)))
            except ValueError:  # half a line, from a host that has vanished
                continue
        return found

    def attempts(self) -> list[list[Event]]:
        """Return the events of each attempt that has begun to train."""
        found: list[list[Event]] = []
        for event in self.events():
            if event.kind == "resumed":
                found.append([])
            found[-1].append(event)
        return found

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait for a condition that must become true while the job runs."""
        deadline = time.monotonic() + TIMEOUT
        while not true():
            assert self.job.process.poll() is None, self.job.output()
            assert time.monotonic() < deadline, self.job.output()
            time.sleep(0.1)

    def wait_for_checkpoints(self, number: int) -> None:
        """Wait until the latest attempt has written some checkpoints."""

        def are_written() -> bool:
            kinds = [event.kind for attempt in self.attempts()[-1:] for event in attempt]
            return kinds.count("checkpoint") >= number

        self.wait_until(are_written)

    def wait_for_attempt(self, *, without: str) -> None:
        """Wait until an attempt that lacks a host has taken a step."""

        def has_begun() -> bool:
            latest = self.attempts()[-1]
            return without not in latest[0].hosts and latest[-1].kind != "resumed"

        self.wait_until(has_begun)

    def stop(self) -> None:
        """Let the job finish."""
        (self._folder / "stop").touch()


def switch_off(hosts: Hosts, name: str) -> None:
    """Make a host lose all its processes when it loses its link."""
    script = f"setsid sh -c {shlex.quote(POWER_OFF)} </dev/null >/dev/null 2>&1 &"
    hosts.check(name, "rm", "-f", "/run/armed")
    hosts.check(name, "sh", "-c", script)
    while hosts.run(name, ["test", "-e", "/run/armed"]).returncode:
        time.sleep(0.05)


def wait_for_host(hosts: Hosts, name: str) -> None:
    """Wait until a host can be reached."""
    while True:
        try:
            hosts.check(name, "true")
        except ConnectionError:
            continue
        return


def check_resumed(before: list[Event], after: list[Event]) -> int:
    """Check where an attempt has resumed; return how many steps were lost."""
    first = after[0]
    written = [event.iteration for event in before if event.kind in ("checkpoint", "resumed")]
    last = max(event.iteration for event in before)
    # A checkpoint may be complete before it is recorded.
    assert written[-1] <= first.iteration <= last, (before[-10:], first)
    assert first.iteration % CHECKPOINT == 0
    (then,) = {event.epoch for event in before if event.iteration == first.iteration}
    fewest = 240 // 4
    assert then - 1 / fewest < first.epoch <= then, (then, first)
    assert last - first.iteration <= CHECKPOINT
    return last - first.iteration


@pytest.mark.parametrize("n_losses", [2, pytest.param(30, marks=pytest.mark.nightly)])
@pytest.mark.timeout(120 * 35)
def test_hosts_vanish_and_return(
    n_losses: int,
    hosts: Hosts,
    folder: Path,
    start_command: Callable[..., Job],
    set_link: Callable[[str, str], None],
) -> None:
    skip_unless_emulated(hosts)
    if len(hosts.names) < 4:
        pytest.skip(f"needs 4 hosts, there are {len(hosts.names)}")
    draw = random.Random(SEED)
    elastic = Elastic(hosts, folder, start_command)
    vanished: list[str] = []
    losses: list[Loss] = []
    for number in range(n_losses):
        elastic.wait_for_checkpoints(2)
        working = elastic.attempts()[-1][0].hosts
        draw.shuffle(vanished)
        n_there = len(working)
        # Ranks need two hosts besides the one that will vanish.
        while vanished and (n_there < 3 or draw.random() < 0.6):
            returned = vanished.pop()
            set_link(returned, "up")
            wait_for_host(hosts, returned)
            n_there += 1
        victim = draw.choice([name for name in working if name != hosts.names[0]])
        how = draw.choice(["link down", "power off"])
        if how == "power off":
            switch_off(hosts, victim)
        set_link(victim, "down")
        start = time.monotonic()
        vanished.append(victim)
        elastic.wait_for_attempt(without=victim)
        seconds = time.monotonic() - start
        before, after = elastic.attempts()[-2:]
        steps = check_resumed(before, after)
        ranks = len(working), len(after[0].hosts)
        host = f"{victim} (rank {working.index(victim)})"
        losses.append(Loss(host, how, *ranks, round(seconds), steps))
        print(f"| {number + 1}", *losses[-1], sep=" | ", flush=True)
    for name in vanished:
        set_link(name, "up")
    elastic.wait_for_checkpoints(1)
    elastic.stop()
    ended = elastic.job.wait()
    print(*(line for line in ended.stderr.splitlines() if "chainermn" in line), sep="\n")
    assert (ended.returncode, ended.timed_out, ended.left_behind) == (0, False, []), ended
    attempts = re.findall(r"attempt (\d+) of \d+: \d ranks on", ended.stderr)
    assert attempts == [str(number + 1) for number in range(len(attempts))]
    assert len(attempts) > n_losses
    assert elastic.events()[-1].kind == "stopped"
    assert not list(folder.glob("job.*"))


KILLED = """\
import os, signal, chainermn
comm = chainermn.create_communicator("naive")
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.recv_obj(1)
"""


def test_host_that_loses_a_rank_is_named(
    hosts: Hosts, folder: Path, start_command: Callable[..., Job]
) -> None:
    """The launcher, the watch and the rank are on three hosts, all of which can be reached."""
    if len(hosts.names) < 3:
        pytest.skip(f"needs 3 hosts, there are {len(hosts.names)}")
    script = folder / "killed.py"
    script.write_text(KILLED)
    places = ",".join(f"{name}:1" for name in hosts.names[1:3])
    options = ["--host", places, "--min-ranks", "2"]
    if "PYTHONPATH" in os.environ:  # Open MPI does not pass it on
        options += ["--forward", "PYTHONPATH"]
    command = [sys.executable, "-m", "chainermn", "launch", *options, str(script)]
    ended = start_command(command).wait()
    assert not ended.timed_out
    assert re.search(
        rf"attempt 1 of 1 ended with exit code \d+; {hosts.names[2]}: named above", ended.stderr
    ), ended.stderr
