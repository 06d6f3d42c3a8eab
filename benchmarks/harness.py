"""Jobs of ranks that are kept alive and measured in turn, so that other load meets all alike."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainermn.launch.mpiexec import launch_environment, mpiexec_command
from ci.cluster import requirements
from ci.cluster.cluster import Cluster

REPOSITORY = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
THE_ORIGINAL = {"CHAINER_COMPAT_BUNDLED_CHAINERMN": "1"}

#: What the interfaces of a host have counted while a rank took a step.
SENT = "MB sent by a rank"

_PATIENCE = 180.0  # seconds for a turn, or for imports
_MOST_REPEATS = 300


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes
    ----------
    title : str
    ranks : tuple of int
        How many each host gets.
    cluster : Cluster, optional
        Of emulated hosts; this machine otherwise.
    """

    title: str
    ranks: tuple[int, ...]
    cluster: Cluster | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(self.ranks)

    def command(self, arguments: Sequence[str], forward: Sequence[str]) -> list[str]:
        """Return the command that starts a job here."""
        if self.cluster is None:
            return mpiexec_command(self.size, arguments)
        first = self.cluster.hosts()[0]
        return first.command(
            *mpiexec_command(self.size, arguments, hosts=self._hosts(), forward=forward)
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of such a job; emulated hosts share the cores."""
        if self.cluster is None:
            return launch_environment()
        return {**launch_environment(self._hosts()), **ONE_THREAD, "GLOO_SOCKET_IFNAME": "eth0"}

    def first_address(self) -> str:
        """Return the name by which all ranks reach the first host."""
        return "localhost" if self.cluster is None else self._hosts()[0][0]

    def _hosts(self) -> list[tuple[str, int]]:
        assert self.cluster is not None
        names = (host.name for host in self.cluster.hosts())
        return list(zip(names, self.ranks, strict=False))


@contextlib.contextmanager
def emulated_hosts(number: int, rate: str) -> Iterator[Cluster | str]:
    """Give hosts joined by links of ``rate``, or the reason why there are none."""
    if reason := requirements.find_missing():
        yield reason
        return
    with Cluster(f"benchmarks-{os.getpid()}") as cluster:
        cluster.up(number, rate=rate, ends_with_this_process=True)
        yield cluster


class Team:
    """A job of ranks. Between its turns it waits and takes no core.

    Parameters
    ----------
    place : Place
    program : str
        The module of `benchmarks.ranks` that the ranks run.
    env : mapping, optional
        Variables of the ranks.
    core : int, optional
        The only core that it may run on.
    """

    def __init__(
        self,
        place: Place,
        program: str,
        *,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
    ) -> None:
        self.place = place
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        folder = Path(self._folder.name)
        self._commands = [_fifo(folder / f"{rank}.commands") for rank in range(place.size)]
        self._answers = [_fifo(folder / f"{rank}.answers") for rank in range(place.size)]
        self._log = folder / "log"
        env = {"BENCHMARK_ROOT": place.first_address(), **(env or {})}
        forward = [*env, *(ONE_THREAD if place.cluster else ()), "GLOO_SOCKET_IFNAME"]
        arguments = ["-m", "benchmarks.ranks", str(folder), program]
        confined = [] if core is None else ["taskset", "--cpu-list", str(core)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*confined, *place.command(arguments, forward)],
                cwd=REPOSITORY,
                env={**place.environment(), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self, contestant: Contestant, repeat: int) -> None:
        """Let all ranks repeat a step."""
        order = {"name": contestant.name, "options": contestant.options, "repeat": repeat}
        for command in self._commands:
            os.write(command, json.dumps(order).encode() + b"\n")

    def finish(self) -> Turn:
        """Wait until all ranks have done so.

        Raises
        ------
        CannotRun
            If none can take part, with the reason.
        RuntimeError
            If the job has ended or does not answer.
        """
        answers = [json.loads(self._read(answer)) for answer in self._answers]
        for answer in answers:
            if "error" in answer:
                raise CannotRun(answer["error"])
        return Turn(
            max(answer["seconds"] for answer in answers),
            {key: [a[key] for a in answers] for key in answers[0] if key != "seconds"},
        )

    def close(self) -> None:
        """Let the ranks end; end them if they do not."""
        for command in self._commands:
            os.write(command, b"null\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (*self._commands, *self._answers):
            os.close(pipe)
        self._folder.cleanup()

    def _read(self, answer: int) -> bytes:
        line = b""
        deadline = time.monotonic() + _PATIENCE
        while not line.endswith(b"\n"):
            if select.select([answer], [], [], 0.5)[0]:
                line += os.read(answer, 65536)
            elif self._process.poll() is not None or time.monotonic() > deadline:
                said = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"a job has ended or does not answer; it said: {said}")
        return line


class CannotRun(Exception):
    """A contestant does not work here; the message is the reason."""


@dataclass(frozen=True)
class Turn:
    """What the ranks of a team measured.

    Attributes
    ----------
    seconds : float
        Of a step, on the slowest rank.
    others : dict
        What else they measured, each a list with an entry for every rank.
    """

    seconds: float
    others: dict[str, list[Any]]


@dataclass(frozen=True)
class Contestant:
    """Something that a team can be told to do.

    Attributes
    ----------
    name : str
    team : str
    options : dict
        For the function ``prepare`` of the team's program.
    """

    name: str
    team: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """All turns of a contestant, or the reason why there are none.

    Attributes
    ----------
    name : str
    seconds : list of float
        One for each turn.
    more : dict
        What else there is to tell, by what it is.
    skipped : str
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)
    skipped: str = ""

    @property
    def median(self) -> float:
        """Return the median of the turns, in seconds."""
        return statistics.median(self.seconds)


def take_turns(
    teams: Mapping[str, Team],
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Measure contestants one after the other, and all of them once a round.

    Parameters
    ----------
    teams : mapping of str to Team
    contestants : sequence of Contestant
    rounds : int
        How many turns each has. One before is not counted.
    seconds : float
        How long a turn takes, unless a single step takes longer.
    tell : callable
        Is given the name of each contestant before its turn.
    """
    measured = {contestant.name: Measured(contestant.name) for contestant in contestants}
    repeats: dict[str, int] = {}
    for contestant in contestants:
        tell(contestant.name)
        team = teams[contestant.team]
        try:
            for _ in range(3):  # the first step initialises, or allocates
                team.start(contestant, 1)
                once = team.finish().seconds
        except CannotRun as error:
            measured[contestant.name].skipped = str(error)
        else:
            repeats[contestant.name] = max(1, min(_MOST_REPEATS, round(seconds / once)))
    for number in range(rounds):
        # A contestant finds what the one before has left behind: not always the same one.
        for contestant in random.Random(number).sample(contestants, len(contestants)):
            if contestant.name in repeats:
                tell(contestant.name)
                team = teams[contestant.team]
                team.start(contestant, repeats[contestant.name])
                turn = team.finish()
                mine = measured[contestant.name]
                mine.seconds.append(turn.seconds)
                if team.place.cluster is not None:
                    mine.more[SENT] = max(turn.others["sent"]) / 1e6
    return list(measured.values())


@contextlib.contextmanager
def running(teams: Mapping[str, Callable[[], Team]]) -> Iterator[dict[str, Team]]:
    """Start teams; end them, whatever happens."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name, start in teams.items():
            started[name] = start()
            stack.callback(started[name].close)
        yield started


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)  # which, unlike reading or writing alone, does not wait
