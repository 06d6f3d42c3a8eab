"""Run a job until it succeeds, and start each attempt on the hosts that are available."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from chainermn.failures.limits import DEFAULT_LIMIT, stall_limit
from chainermn.launch.ending import Ending
from chainermn.launch.hosts import Host, count_ranks, show_places
from chainermn.launch.job import end_marked
from chainermn.launch.membership import Discover, Membership
from chainermn.launch.reachable import HostState, examine_hosts, unreachable
from chainermn.launch.restarts import STOPPED, SignalsToChild, say

#: Variable that marks all processes of a job that `run_elastic` starts, on every host.
MARK = "CHAINERMN_LAUNCH"
#: Seconds between two looks at a running job, and between two at its hosts.
PERIOD, PERIOD_OF_HOSTS = 1.0, 10.0
#: Seconds that mpiexec gets to end after the watch has said that the job must end.
GRACE = 15.0
#: Seconds that mpiexec gets to obey a signal.
PATIENCE = 5.0

#: Takes hosts and variables for all ranks; returns a command and its environment.
MakeCommand = Callable[[list[Host], Mapping[str, str]], tuple[list[str], dict[str, str]]]


def run_elastic(
    make_command: MakeCommand,
    discover: Discover,
    files: Sequence[str],
    *,
    min_ranks: int,
    max_ranks: int | None,
    max_restarts: int,
    patience: float,
) -> int:
    """Run a job until it succeeds, fails too often, or is ended by a signal.

    Parameters
    ----------
    make_command : callable
        Function that builds the command of an attempt; see `MakeCommand`.
    discover : callable
        Function that returns the hosts that exist now.
    files : sequence of str
        Paths of the files that each host must have.
    min_ranks, max_ranks, patience
        See `Membership`.
    max_restarts : int
        Number of attempts after the first one.

    Returns
    -------
    int
        Exit code of the last attempt. If a signal comes between attempts, the code for that
        signal.

    Raises
    ------
    click.ClickException
        If there are too few hosts for longer than ``patience``.
    """
    mark = uuid.uuid4().hex
    known: dict[str, HostState] = {}

    def find_unusable(names: Sequence[str]) -> dict[str, str]:
        known.update(examine_hosts(names, files, f"{MARK}={mark}"))
        return {name: known[name].obstacle for name in names if known[name].obstacle}

    with SignalsToChild() as signals:
        membership = Membership(
            discover,
            find_unusable,
            min_ranks=min_ranks,
            max_ranks=max_ranks,
            patience=patience,
            pause=signals.pause,
        )
        for attempt in range(1, max_restarts + 2):
            hosts = membership.choose()
            if hosts is None or signals.received:
                break
            without = "".join(f"; {name}: {why}" for name, why in membership.left_out.items())
            number = f"attempt {attempt} of {max_restarts + 1}"
            say(f"{number}: {count_ranks(hosts)} ranks on {show_places(hosts)}{without}")
            start, names = time.monotonic(), [name for name, _ in hosts]
            with Ending(count_ranks(hosts)) as ending:
                command, environment = make_command(hosts, {MARK: mark, **ending.environment})
                code = _run_once(signals, command, environment, names, ending)
            if code == 0 and ending.began_at is not None:
                # Open MPI 5.0.11's mpiexec sometimes returns 0 after it has lost a host.
                code = os.EX_SOFTWARE
            if code in (0, STOPPED) or signals.received:
                return code
            culprits = find_unusable(names)
            # When Open MPI loses a host, it kills the ranks of the others: they are not to blame.
            if not culprits and (named := _listed(ending.lost, hosts, known)):
                culprits[named] = "named above"
            because = "; ".join(f"{name}: {why}" for name, why in culprits.items())
            say(f"{number} ended with exit code {code}" + (f"; {because}" if because else ""))
            if attempt <= max_restarts:
                membership.note_failure(names, culprits, time.monotonic() - start)
        else:
            return code
    if signals.code == STOPPED:
        say("stopped by SIGUSR1 while no attempt ran; the job can be started again")
    return signals.code


def _run_once(
    signals: SignalsToChild,
    command: Sequence[str],
    environment: Mapping[str, str],
    names: Sequence[str],
    ending: Ending,
) -> int:
    """Run one attempt; return its exit code."""
    process = signals.start(command, environment)
    with _lookout(process, names, ending, 2 * _stall_limit(environment)):
        code = signals.wait(process)
    # An ssh may still wait for a lost host.
    end_marked(MARK, environment[MARK])
    return code


def _stall_limit(environment: Mapping[str, str]) -> float:
    try:
        return stall_limit(environment) or DEFAULT_LIMIT
    except ValueError:  # the ranks report what is wrong with it
        return DEFAULT_LIMIT


def _listed(name: str, hosts: Iterable[Host], known: Mapping[str, HostState]) -> str:
    """Return the listed name of the host that calls itself ``name``; empty if unknown."""
    if not name:
        return ""
    names = [listed for listed, _ in hosts]
    for listed in names:
        if name in (listed, known[listed].name if listed in known else ""):
            return listed
    # The first part of an IP address is not a host name.
    short = name.partition(".")[0]
    alike = [it for it in names if it.partition(".")[0] == short and not short.isdigit()]
    return alike[0] if len(alike) == 1 else ""


@contextlib.contextmanager
def _lookout(
    process: subprocess.Popen[bytes], names: Sequence[str], ending: Ending, limit: float
) -> Iterator[None]:
    """End ``mpiexec`` if it waits for a lost host, as Open MPI's does.

    It gets `GRACE` seconds after the watch has ended the job, or ``limit`` seconds after the host
    was lost.
    """
    over = threading.Event()

    def look() -> None:
        gone_since: dict[str, float] = {}
        next_look = time.monotonic() + PERIOD_OF_HOSTS
        while not over.wait(PERIOD):
            now = time.monotonic()
            began_at = ending.began_at
            is_over = began_at is not None and now - began_at > GRACE
            if now > next_look:
                next_look = now + PERIOD_OF_HOSTS
                gone_since = {name: gone_since.get(name, now) for name in unreachable(names)}
                longest = min(gone_since, key=gone_since.__getitem__, default="")
                is_over |= bool(longest) and now - gone_since[longest] > limit
            if is_over:
                say("the job is over, but mpiexec is still running; ending it")
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                process.kill()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
