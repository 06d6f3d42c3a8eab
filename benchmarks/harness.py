"""Jobs of ranks that stay alive and take turns, so other load slows all of them down alike."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Measured
from chainermn.launch.mpiexec import launch_environment, mpiexec_command
from ci.cluster import requirements
from ci.cluster.cluster import Cluster

REPOSITORY = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ALL_CORES = {"OMP_NUM_THREADS": str(os.cpu_count())}
WITH_CUDNN = {"CHAINER_COMPAT_CUDNN": "1"}
CHANNELS_LAST = {**WITH_CUDNN, "CHAINER_CHANNELS_LAST": "1"}
WITH_NUMPY, WITH_ONEDNN = {"CHAINER_USE_IDEEP": "never"}, {"CHAINER_USE_IDEEP": "auto"}
THE_ORIGINAL = {"CHAINER_COMPAT_BUNDLED_CHAINERMN": "1"}

_PATIENCE = 180.0  # seconds for a turn, or for imports
_MOST_REPEATS = 300

#: Jobs of contestants: the module of `benchmarks.ranks` that they run, and their variables.
TEAMS = {
    "ours": ("with_chainer", {}),
    "ours, NumPy": ("with_chainer", WITH_NUMPY),
    "before": ("with_chainer", {}),
    "not watched": ("unwatched", {}),
    "in a trainer": ("in_trainer", {}),
    "in a trainer, recorded": ("in_trainer", {"CHAINERMN_TIMELINE": os.devnull}),
    "in a trainer, reported": ("in_trainer", {}),
    "original": ("with_chainer", {**THE_ORIGINAL, **ONE_THREAD}),
    "original, threads left alone": ("with_chainer", THE_ORIGINAL),
    "a thread for every core": ("with_chainer", ALL_CORES),
    "NumPy": ("with_chainer", {**WITH_NUMPY, **ONE_THREAD}),
    "NumPy, all cores": ("with_chainer", {**WITH_NUMPY, **ALL_CORES}),
    "oneDNN": ("with_chainer", {**WITH_ONEDNN, **ONE_THREAD}),
    "oneDNN, all cores": ("with_chainer", {**WITH_ONEDNN, **ALL_CORES}),
    "with cuDNN": ("with_chainer", WITH_CUDNN),
    "with cuDNN, graphs": ("with_chainer", WITH_CUDNN),
    "with cuDNN, channels last": ("with_chainer", CHANNELS_LAST),
    "with cuDNN, channels last, graphs": ("with_chainer", CHANNELS_LAST),
    "ours, graphs": ("with_chainer", {}),
    "snapshots": ("snapshots", {}),
    "copies on a GPU": ("gpu_copies", {}),
    "kernels on a GPU": ("gpu_kernels", {}),
    "mpi": ("with_mpi", {}),
    "torch": ("with_torch", ONE_THREAD),
    "torch, graphs": ("torch_graphs", ONE_THREAD),
    "torch, all cores": ("with_torch", ALL_CORES),
}


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes
    ----------
    rounds : int
        Number of turns of each contestant.
    quick : bool
        Whether to measure as little as possible, to see if everything runs.
    only : str
        Text in the titles of groups to measure.
    before : str
        Python with another version of chainermn to compare with, or empty.
    tell : callable
        Function that gets a description of the current measurement.
    """

    rounds: int
    quick: bool
    only: str
    before: str
    tell: Callable[[str], None]

    def wants(self, title: str) -> bool:
        """Return whether to measure a group with this title."""
        return self.only in title


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes
    ----------
    title : str
    ranks : tuple of int
        Number of ranks on each host.
    cluster : Cluster, optional
        Emulated hosts. Default: this machine.
    """

    title: str
    ranks: tuple[int, ...]
    cluster: Cluster | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(self.ranks)

    def command(self, arguments: Sequence[str], forward: Sequence[str]) -> list[str]:
        """Return the command that starts a job in this place."""
        if self.cluster is None:
            return mpiexec_command(self.size, arguments, python=False)
        command = mpiexec_command(
            self.size, arguments, python=False, hosts=self._hosts(), forward=forward
        )
        return self.cluster.hosts()[0].command(*command)

    def environment(self) -> dict[str, str]:
        """Return the environment of such a job. Emulated hosts share the cores."""
        if self.cluster is None:
            return launch_environment()
        return {**launch_environment(self._hosts()), **ONE_THREAD, "GLOO_SOCKET_IFNAME": "eth0"}

    def first_address(self) -> str:
        """Return the name of the first host, as all ranks know it."""
        return "localhost" if self.cluster is None else self._hosts()[0][0]

    def _hosts(self) -> list[tuple[str, int]]:
        assert self.cluster is not None
        names = (host.name for host in self.cluster.hosts())
        return list(zip(names, self.ranks, strict=True))


def places(
    ranks: Mapping[str, tuple[int, ...]], rate: str = "1gbit", latency: float = 0.0
) -> Iterator[Place | str]:
    """Yield places with these titles, or the reason why there are no emulated hosts.

    The links between hosts have this rate, and this latency in seconds. Hosts exist only while
    their places are in use.
    """
    for title, on_hosts in ranks.items():
        if len(on_hosts) == 1:
            yield Place(title, on_hosts)
    if all(len(on_hosts) == 1 for on_hosts in ranks.values()):
        return
    if reason := requirements.find_missing():
        yield f"two hosts: {reason}"
        return
    with Cluster(f"benchmarks-{os.getpid()}") as cluster:
        number = max(map(len, ranks.values()))
        cluster.up(number, rate=rate, latency=latency, ends_with_this_process=True)
        for title, on_hosts in ranks.items():
            if len(on_hosts) == number:
                yield Place(title, on_hosts, cluster)


def why_no_torch() -> list[str]:
    """Return the reason if PyTorch cannot take part, else an empty list."""
    if importlib.util.find_spec("torch") is None:
        return ["PyTorch: it is not installed; pip install torch"]
    return []


@dataclass(frozen=True)
class Contestant:
    """A step that a team can repeat.

    Attributes
    ----------
    name : str
    team : str
        Name of the job that runs it.
    options : dict
        Arguments of the function that prepares the step.
    """

    name: str
    team: str
    options: dict[str, Any] = field(default_factory=dict)


class CannotRun(Exception):
    """Raised if a contestant does not work here. The message is the reason."""


class Team:
    """A job of ranks. Between its turns it uses no processor time.

    Parameters
    ----------
    place : Place
    program : str
        Module of `benchmarks.ranks` that the ranks run.
    env : mapping, optional
        Environment variables of the ranks.
    core : int, optional
        Core to confine the job to.
    python : str
        Interpreter of the ranks.
    """

    def __init__(
        self,
        place: Place,
        program: str,
        *,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self.place = place
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        folder = Path(self._folder.name)
        self._commands = [_fifo(folder / f"{rank}.commands") for rank in range(place.size)]
        self._answers = [_fifo(folder / f"{rank}.answers") for rank in range(place.size)]
        self._log = folder / "log"
        env = {"BENCHMARK_ROOT": place.first_address(), **(env or {})}
        forward = [*env, *(ONE_THREAD if place.cluster else ()), "GLOO_SOCKET_IFNAME"]
        arguments = [python, "-m", "benchmarks.ranks", str(folder), program]
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

    def start(self, contestant: Contestant, repeat: int, before: int = 1) -> None:
        """Let all ranks repeat a step, after ``before`` steps that are not measured."""
        order = {
            "name": contestant.name,
            "options": contestant.options,
            "repeat": repeat,
            "before": before,
        }
        for command in self._commands:
            os.write(command, json.dumps(order).encode() + b"\n")

    def finish(self) -> list[dict[str, Any]]:
        """Wait for all ranks, and return what each has measured.

        These are ``seconds`` per step, and perhaps other ``figures``. With `Orders.obey`, they
        also have ``times``, the number of steps in a repeat, and the bytes ``sent`` per step.

        Raises
        ------
        CannotRun
            If the contestant does not work here.
        RuntimeError
            If the job has ended or does not answer.
        """
        answers = [json.loads(self._read(answer)) for answer in self._answers]
        for answer in answers:
            if "error" in answer:
                raise CannotRun(answer["error"])
        return answers

    def close(self) -> None:
        """Ask the ranks to end, and kill them if they do not."""
        for command in self._commands:
            os.write(command, b"null\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for end in (self._process.terminate, self._process.kill):
            if self._process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
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
                raise RuntimeError(f"a job has ended or does not answer. It said: {said}")
        return line


def _fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)  # opening for reading or writing alone would wait


@contextlib.contextmanager
def running(starts: Mapping[str, Callable[[], Team]]) -> Iterator[dict[str, Team]]:
    """Start teams, and end them in any case."""
    with contextlib.ExitStack() as stack:
        teams = {}
        for name, start in starts.items():
            teams[name] = start()
            stack.callback(teams[name].close)
        yield teams


def slowest(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of the slowest rank."""
    return float(max(answer["seconds"] for answer in answers))


def take_turns(
    place: Place,
    contestants: Sequence[Contestant],
    settings: Settings,
    *,
    seconds: float,
    rounds: int | None = None,
) -> list[Measured]:
    """Measure contestants one after the other, each of them once per round.

    Parameters
    ----------
    place : Place
    contestants : sequence of Contestant
        Those of PyTorch are left out if it is not installed. With ``settings.before``, another
        version of the library takes part for each contestant of ours.
    settings : Settings
    seconds : float
        Length of a turn, unless a single step takes longer.
    rounds : int, optional
        Number of turns. Default: that of the settings.
    """
    if why_no_torch():
        contestants = [c for c in contestants if not c.team.startswith("torch")]
    if settings.before:
        ours = [c for c in contestants if c.team == "ours"]
        before = [replace(c, name=f"before: {c.name}", team="before") for c in ours]
        contestants = [*contestants, *before]
    names = dict.fromkeys(contestant.team for contestant in contestants)
    with teams_of(place, names, settings) as teams:
        return turns(teams, contestants, settings, seconds=seconds, rounds=rounds)


@contextlib.contextmanager
def teams_of(place: Place, names: Iterable[str], settings: Settings) -> Iterator[dict[str, Team]]:
    """Start the teams with these names."""
    with running({name: _starter(name, place, settings) for name in names}) as teams:
        yield teams


def _starter(name: str, place: Place, settings: Settings) -> Callable[[], Team]:
    program, env = TEAMS[name]
    python = settings.before if name == "before" else sys.executable
    return lambda: Team(place, program, env=env, python=python)


def turns(
    teams: Mapping[str, Team],
    contestants: Sequence[Contestant],
    settings: Settings,
    *,
    seconds: float,
    rounds: int | None = None,
) -> list[Measured]:
    """Measure contestants of running teams, like `take_turns`."""
    rounds = 1 if settings.quick else rounds or settings.rounds
    seconds = 0.0 if settings.quick else seconds
    measured = {contestant.name: Measured(contestant.name) for contestant in contestants}
    repeats: dict[str, int] = {}
    for contestant in contestants:
        team = teams[contestant.team]
        settings.tell(f"{team.place.title}: {contestant.name}")
        try:
            for _ in range(3):  # the first step initializes or allocates
                team.start(contestant, 1)
                answers = team.finish()
                if (once := slowest(answers) * answers[0].get("times", 1)) > seconds:
                    break  # initializing matters little in a long step
        except CannotRun as error:
            measured[contestant.name].skipped = str(error)
        else:
            repeats[contestant.name] = max(1, min(_MOST_REPEATS, round(seconds / once)))
    for number in range(rounds):
        # Each contestant finds the caches of the one before it, so the order changes.
        order = random.Random(number)  # noqa: S311  # not for cryptography
        for contestant in order.sample(contestants, len(contestants)):
            if contestant.name in repeats:
                team = teams[contestant.team]
                settings.tell(f"{team.place.title}: {contestant.name}")
                repeat = repeats[contestant.name]
                # If a step is so long that it runs once per turn, the first step is measured.
                team.start(contestant, repeat, before=int(repeat > 1))
                answers = team.finish()
                row = measured[contestant.name]
                row.seconds.append(slowest(answers))
                row.more |= answers[0].get("figures", {})
                if team.place.cluster is not None:
                    row.more["MB sent per host"] = max(answer["sent"] for answer in answers) / 1e6
    return list(measured.values())
