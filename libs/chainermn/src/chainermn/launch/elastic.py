"""Run a job until it succeeds, and start each attempt on the hosts that are available."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

from chainermn.failures.limits import DEFAULT_LIMIT, stall_limit
from chainermn.launch.hosts import Host, count_ranks, show_places
from chainermn.launch.job import end_marked
from chainermn.launch.membership import Discover, Membership
from chainermn.launch.reachable import HostState, examine_hosts, unreachable
from chainermn.launch.restarts import STOPPED, SignalsToChild, say

#: Variable that marks all processes of a job that `run_elastic` starts, on every host.
MARK = "CHAINERMN_LAUNCH"
#: Seconds between two looks at a running job, and between two at its hosts.
PERIOD, PERIOD_OF_HOSTS = 1.0, 10.0
#: Seconds that mpiexec gets to end after ranks have said that they end the job.
GRACE = 15.0
#: Seconds that mpiexec gets to obey a signal.
PATIENCE = 5.0
# Messages in which ranks report a lost host or rank, and Open MPI a rank killed by a signal. No
# host is to blame if the script raises or if ranks wait for each other.
_LOST_HOST = re.compile(
    rb"(?:chainermn: (?:nothing has come from |[^:]*? on )|prterun noticed .* on node )([\w.-]+)"
)
_LOSSES = (
    b" disappeared first",
    b" has been silent for ",
    b" ended before create_communicator",
    b"nothing has come from ",
    b"the process that watches over the job ",
    b"prterun noticed ",
)
_ENDS = b"nding the whole job", b"therefore will terminate the job"

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
            command, environment = make_command(hosts, {MARK: mark})
            start = time.monotonic()
            lost = _LostHost()
            names = [name for name, _ in hosts]
            code = _run_once(signals, command, environment, names, lost)
            if code in (0, STOPPED) or signals.received:
                return code
            named = _listed(lost.name, hosts, known)
            culprits = find_unusable(names)
            if named:
                culprits.setdefault(named, "named above")
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
    lost: _LostHost,
) -> int:
    """Run one attempt; return its exit code."""
    process = signals.start(command, environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    reader = threading.Thread(target=lost.listen, args=[process.stderr], daemon=True)
    reader.start()
    with _lookout(process, names, lost, 2 * _stall_limit(environment)):
        code = signals.wait(process)
    # An ssh that waits for a lost host keeps standard error open.
    end_marked(MARK, environment[MARK])
    reader.join(PATIENCE)
    if not reader.is_alive():
        process.stderr.close()
    if code == 0 and lost.ended_at is not None:
        # Open MPI 5.0.11's mpiexec sometimes returns 0 after it has lost a host.
        return os.EX_SOFTWARE
    return code


def _stall_limit(environment: Mapping[str, str]) -> float:
    try:
        return stall_limit(environment) or DEFAULT_LIMIT
    except ValueError:  # the ranks report what is wrong with it
        return DEFAULT_LIMIT


class _LostHost:
    """Passes on a job's standard error, and remembers the host that it reports as lost.

    Attributes
    ----------
    name : str
        First lost host, under the name that it calls itself; empty if none was reported.
    ended_at : float or None
        Time at which the ranks or Open MPI reported that they end the job.
    """

    def __init__(self) -> None:
        self.name = ""
        self.ended_at: float | None = None
        self._line = b""

    def listen(self, stream: IO[bytes]) -> None:
        """Read a pipe until it closes."""
        sys.stderr.flush()
        while part := os.read(stream.fileno(), 1 << 16):
            self.hear(part)
            with contextlib.suppress(OSError):  # nobody reads our standard error any more
                while part:
                    part = part[os.write(2, part) :]
        if self._line:  # Open MPI's mpiexec may end without a newline
            with contextlib.suppress(OSError):
                os.write(2, b"\n")

    def hear(self, part: bytes) -> None:
        """Look for a lost host in the lines that are now complete."""
        *lines, self._line = (self._line + part).split(b"\n")
        self._line = self._line[-4096:]
        for line in lines:
            if self.ended_at is not None:
                return  # ranks that die from now on were ended on purpose
            found = _LOST_HOST.match(line)
            if found and not self.name and any(words in line for words in _LOSSES):
                self.name = found[1].decode()
            if any(words in line for words in _ENDS):
                self.ended_at = time.monotonic()


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
    process: subprocess.Popen[bytes], names: Sequence[str], lost: _LostHost, limit: float
) -> Iterator[None]:
    """End ``mpiexec`` if it waits for a lost host, as Open MPI's does.

    It gets `GRACE` seconds after the ranks have ended the job, or ``limit`` seconds after the
    host was lost.
    """
    over = threading.Event()

    def look() -> None:
        gone_since: dict[str, float] = {}
        next_look = time.monotonic() + PERIOD_OF_HOSTS
        while not over.wait(PERIOD):
            now = time.monotonic()
            ended_at = lost.ended_at
            is_over = ended_at is not None and now - ended_at > GRACE
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
