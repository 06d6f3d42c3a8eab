"""Run a job again and again, each time on the hosts that there are, until it succeeds."""

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

from chainermn.failures.clock import DEFAULT_LIMIT, stall_limit
from chainermn.launch.hosts import Host, count_ranks, show_places
from chainermn.launch.job import end_marked
from chainermn.launch.membership import Discover, Membership
from chainermn.launch.reachable import HostState, examine_hosts, unreachable
from chainermn.launch.restarts import STOPPED, SignalsToChild, say

#: Every process of a job that `run_elastic` starts has this variable, on whatever host.
MARK = "CHAINERMN_LAUNCH"
# Seconds between two looks at a running job, and between two at its hosts.
_PERIOD, _PERIOD_OF_HOSTS = 1.0, 10.0
# For mpiexec to end, once ranks have said that they end the job.
_GRACE = 15.0
# For mpiexec to obey a signal.
_PATIENCE = 5.0
# What ranks say of a host or a rank that is lost, and Open MPI of one that a signal has ended. If
# the script raises or ranks wait for each other, no host is to blame.
_ACCUSATION = re.compile(
    rb"(?:chainermn: (?:nothing has come from |[^:]*? on )|prterun noticed .* on node )([\w.-]+)"
)
_LOSSES = (
    b" is the first to be gone",
    b" has been silent for ",
    b" ended before create_communicator",
    b"nothing has come from ",
    b"the process that watches over the job ",
    b"prterun noticed ",
)
_ENDS = b"he whole job is being ended", b"therefore will terminate the job"

#: Takes hosts and variables to give to all ranks, and returns a command and its environment.
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
    """Run a job until it succeeds, has failed too often, or is ended by a signal.

    Parameters
    ----------
    make_command : callable
        See `MakeCommand`.
    discover : callable
        Returns the hosts that there are now.
    files : sequence of str
        Paths of what each host must have.
    min_ranks, max_ranks, patience
        See `Membership`.
    max_restarts : int
        Number of attempts after the first one.

    Returns
    -------
    int
        The exit code of the last attempt; if a signal came while none ran, that of the signal.

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
            accused = _Accused()
            names = [name for name, _ in hosts]
            code = _run_once(signals, command, environment, names, accused)
            if code in (0, STOPPED) or signals.received:
                return code
            named = _listed(accused.name, hosts, known)
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
    accused: _Accused,
) -> int:
    """Run one attempt; return its exit code."""
    process = signals.start(command, environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    reader = threading.Thread(target=accused.listen, args=[process.stderr], daemon=True)
    reader.start()
    with _lookout(process, names, accused, 2 * _stall_limit(environment)):
        code = signals.wait(process)
    # An ssh that waits for a host that is gone keeps standard error open.
    end_marked(MARK, environment[MARK])
    reader.join(_PATIENCE)
    if not reader.is_alive():
        process.stderr.close()
    if code == 0 and accused.ended_at is not None:
        # As Open MPI's mpiexec sometimes says after it has lost a host (5.0.11).
        return os.EX_SOFTWARE
    return code


def _stall_limit(environment: Mapping[str, str]) -> float:
    try:
        return stall_limit(environment) or DEFAULT_LIMIT
    except ValueError:  # the ranks say what is wrong with it
        return DEFAULT_LIMIT


class _Accused:
    """Passes on what a job writes to standard error, and remembers which host it says is lost.

    Attributes
    ----------
    name : str
        As the host calls itself, the first one; empty if none is named.
    ended_at : float or None
        When ranks, or Open MPI, have said that they end the job.
    """

    def __init__(self) -> None:
        self.name = ""
        self.ended_at: float | None = None
        self._line = b""

    def listen(self, stream: IO[bytes]) -> None:
        """Read a pipe to its end."""
        sys.stderr.flush()
        while part := os.read(stream.fileno(), 1 << 16):
            self.hear(part)
            with contextlib.suppress(OSError):  # nobody reads it any more
                while part:
                    part = part[os.write(2, part) :]
        if self._line:  # as after the last words of Open MPI's mpiexec
            with contextlib.suppress(OSError):
                os.write(2, b"\n")

    def hear(self, part: bytes) -> None:
        """Look for a host in the lines that are complete now."""
        *lines, self._line = (self._line + part).split(b"\n")
        self._line = self._line[-4096:]
        for line in lines:
            if self.ended_at is not None:
                return  # ranks that die from here on are ended
            found = _ACCUSATION.match(line)
            if found and not self.name and any(words in line for words in _LOSSES):
                self.name = found[1].decode()
            if any(words in line for words in _ENDS):
                self.ended_at = time.monotonic()


def _listed(name: str, hosts: Iterable[Host], known: Mapping[str, HostState]) -> str:
    """Return how a host that calls itself ``name`` is listed; empty if it is not known."""
    if not name:
        return ""
    names = [listed for listed, _ in hosts]
    for listed in names:
        if name in (listed, known[listed].name if listed in known else ""):
            return listed
    # The first part of an address is no name of a host.
    short = name.partition(".")[0]
    alike = [it for it in names if it.partition(".")[0] == short and not short.isdigit()]
    return alike[0] if len(alike) == 1 else ""


@contextlib.contextmanager
def _lookout(
    process: subprocess.Popen[bytes], names: Sequence[str], accused: _Accused, limit: float
) -> Iterator[None]:
    """End ``mpiexec`` if it waits for a host that is gone, as Open MPI's does.

    It has `_GRACE` seconds once ranks have ended the job; if no rank can, ``limit`` seconds.
    """
    over = threading.Event()

    def look() -> None:
        gone_since: dict[str, float] = {}
        next_look = time.monotonic() + _PERIOD_OF_HOSTS
        while not over.wait(_PERIOD):
            now = time.monotonic()
            ended_at = accused.ended_at
            is_over = ended_at is not None and now - ended_at > _GRACE
            if now > next_look:
                next_look = now + _PERIOD_OF_HOSTS
                gone_since = {name: gone_since.get(name, now) for name in unreachable(names)}
                longest = min(gone_since, key=gone_since.__getitem__, default="")
                is_over |= bool(longest) and now - gone_since[longest] > limit
            if is_over:
                say("the job is over, but mpiexec does not end; ending it")
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE)
                process.kill()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
