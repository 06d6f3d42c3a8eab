"""The commands and code on the pages work, and every name and file they mention exists."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import differences
import pages
import psutil
import pytest
from click.testing import CliRunner
from loading import load
from on_ranks import (
    EXAMPLES,
    LIMIT,
    described,
    lines_here,
    lines_of,
    lines_of_job,
    mpi,
    run_script,
)

import chainermn
from chainermn.communicators import registered
from chainermn.doctor.checks import CHECKS
from chainermn.profiling.report import report
from chainermn.testing.mpiexec import JOB_VARIABLE, direct_environment, mpi_flavor

DOCS, ROOT = pages.DOCS, pages.ROOT
pytestmark = pytest.mark.timeout(4 * LIMIT)


# Blocks


def test_every_block_says_whether_it_is_run():
    marks = r"run: (\d ranks?|mpiexec|here|clean|tutorial|two hosts)|not run: .+"
    code = [block for block in pages.all_blocks() if block.language not in pages.NOT_CODE]
    assert [str(b) for b in code if b.language == ""] == []
    unmarked = [str(b) for b in code if b.language != "pycon" and not re.fullmatch(marks, b.mark)]
    assert unmarked == []


@pytest.fixture
def top(shared_tmp_path, monkeypatch) -> Path:
    """Enter a folder that looks like the top of the repository, the same on all ranks."""
    folder = shared_tmp_path / "chainermn"
    folder.mkdir(exist_ok=True)
    make_look_like_the_repository(folder)
    monkeypatch.chdir(folder)
    return folder


def on(ranks: int) -> pytest.MarkDecorator:
    """Run a test with each block of Python and each command for this number of ranks."""
    blocks = [*pages.marked(rf"run: {ranks} ranks?"), *pages.marked("run: mpiexec")]
    chosen = [b for b in blocks if b.mark != "run: mpiexec" or f"-n {ranks} " in b.text]
    return pytest.mark.parametrize("block", chosen, ids=str)


def show(block: pages.Block) -> None:
    """Run a block on the ranks of this test, and compare what they print."""
    if block.mark == "run: mpiexec":
        printed = printed_by_command(block.text)
    else:
        code = compile(block.text, str(block), "exec")
        printed = lines_of(lambda: exec(code, {"__name__": "__main__"}))
    if (expected := pages.printed_by(block)) is not None:
        assert printed == expected


@mpi(1)
@on(1)
def test_block_on_1_rank(top, block):
    show(block)


@mpi(2)
@on(2)
def test_block_on_2_ranks(top, block):
    show(block)


@mpi(3)
@on(3)
def test_block_on_3_ranks(top, block):
    show(block)


@mpi(4)
@on(4)
def test_block_on_4_ranks(top, block):
    show(block)


def test_blocks_run_on_at_most_4_ranks():
    ranks = r"run: ([1-4] ranks?|(?!\d).*)|(?!run: ).*"
    blocks = pages.all_blocks()
    assert [str(b) for b in blocks if not re.fullmatch(ranks, b.mark)] == []
    commands = [b for b in blocks if b.mark == "run: mpiexec"]
    command = r"mpiexec -n [1-4] python \S+.*\n"
    assert [str(b) for b in commands if not re.fullmatch(command, b.text)] == []


def printed_by_command(line: str) -> list[str]:
    """Do on the ranks of this test what a command in a shell does; return the lines it prints."""
    words = shlex.split(line)
    match words:
        case ["mpiexec", "-n", ranks, "python", script, *arguments]:
            assert int(ranks) == chainermn.create_communicator().size
            return lines_here(script, *arguments)
        case ["python", script, *arguments]:
            return lines_of(on_rank_0(lambda: run_script(script, *arguments)))
        case ["cd", folder]:
            return lines_of(lambda: os.chdir(folder))
    return lines_of(on_rank_0(lambda: print(subprocess.check_output(words, text=True), end="")))


def on_rank_0(run):
    """Return a function that does something on rank 0 of this test."""
    is_first = chainermn.create_communicator().rank == 0
    return run if is_first else lambda: None


def run_in_shell(commands: str, cwd: Path, env: dict[str, str]) -> str:
    """Run commands in a folder that looks like the top of the repository; return their output."""
    make_look_like_the_repository(cwd)
    return output_of_shell(commands, cwd, env)


def make_look_like_the_repository(folder: Path) -> None:
    for name in ("apps", "ci", "docs", "libs"):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            (folder / name).symlink_to(ROOT / name)


def output_of_shell(commands: str, cwd: Path, env: dict[str, str]) -> str:
    """Run commands that must all succeed; return what they print."""
    output = cwd / "output"
    output.unlink(missing_ok=True)
    with output.open("ab") as written:  # because others write to it too
        shell = subprocess.Popen(
            ["bash", "-euc", commands],
            cwd=cwd,
            env={**env, "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        hangs = ""
        try:
            shell.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            hangs = f"not over after {LIMIT} s\n{described(offspring(shell))}"
        finally:
            end_with_stacks(shell)
    assert (shell.returncode, hangs) == (0, ""), hangs + output.read_text()
    return output.read_text()


def offspring(shell: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(shell.pid).children(recursive=True) if shell.poll() is None else []


def end_with_stacks(shell: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a shell; Python processes first print where they are."""
    processes = offspring(shell)
    for number in (signal.SIGABRT, signal.SIGKILL):
        for process in reversed(processes):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(processes, timeout=5)
    shell.kill()
    shell.wait()


@pytest.mark.parametrize("block", pages.marked("run: here"), ids=str)
def test_shell_block(block, tmp_path):
    run_in_shell(block.text, tmp_path, direct_environment())


@pytest.mark.venv
@pytest.mark.parametrize("block", pages.marked("run: clean"), ids=str)
def test_shell_block_in_a_clean_environment(block, tmp_path):
    if "CHAINERMN_WHEELHOUSE" not in os.environ:
        pytest.skip("CHAINERMN_WHEELHOUSE names no folder of wheels; nox -s install_tests sets it")
    if not importlib.util.find_spec("ensurepip"):
        pytest.skip("this Python makes no environments (venv)")
    if mpi_flavor() == "openmpi":
        pytest.skip("brings an MPI of its own: tested where this environment has MPICH")
    wheels = Path(os.environ["CHAINERMN_WHEELHOUSE"])
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3").symlink_to(sys._base_executable)
    if "uv " in block.text and not shutil.which("uv"):
        unpack_uv(wheels, tools)
    settings = f'no-index = true\nfind-links = ["{wheels}"]\npython-preference = "only-system"\n'
    (tmp_path / "uv.toml").write_text(settings)
    names = {"LANG", "LC_ALL", "PIP_NO_COMPILE"} & os.environ.keys()
    kept = {name: os.environ[name] for name in names}
    env = {
        **kept,
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels.as_uri(),  # it is split at spaces
        "UV_CONFIG_FILE": str(tmp_path / "uv.toml"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    run_in_shell(block.text, tmp_path, env)


def unpack_uv(wheels: Path, folder: Path) -> None:
    found = sorted(wheels.glob("uv-*.whl"))
    if not found:
        pytest.skip("uv is neither installed nor among the wheels")
    with zipfile.ZipFile(found[-1]) as wheel:
        (program,) = (name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        (folder / "uv").write_bytes(wheel.read(program))
    (folder / "uv").chmod(0o755)


@mpi(1)
@pytest.mark.parametrize("block", pages.in_language("pycon"), ids=str)
def test_doctests(top, block):
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), None, None)
    said: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=said.append).failed, "".join(said)


def test_every_column_of_a_table_has_a_heading():
    heads = re.compile(r"^\|(.*)\|\n\|[-:| ]+\|$", re.MULTILINE)
    nameless = [
        (str(page.relative_to(ROOT)), head)
        for page in [*pages.PAGES, *pages.READMES]
        for head in heads.findall(pages.read(page))
        if not all(cell.strip() for cell in head.split("|"))
    ]
    assert nameless == []


def test_pages_look_right_on_github_too():
    """This skips the landing page (GitHub has the README) and pages that include others."""
    of_the_site = {"index.md", "security.md", "apps.md"}
    raw = [
        f"{name}: {line}"
        for name in (str(page.relative_to(DOCS)) for page in pages.PAGES)
        if name not in of_the_site and not name.startswith(("api/", "apps/"))
        for line in pages.read(DOCS / name).splitlines()
        if re.search(r"^ *(:{3,}|`{3,}\{)|^---$|\{[\w:]+\}`", line)
    ]
    assert raw == []


# The tutorial


def edit(script: str, difference: str) -> str:
    """Change a script as a reader does: go to the place and replace the lines with a minus."""
    place, *changed = difference.splitlines()
    first, last, function = re.fullmatch(
        r"@@ train_single\.py, lines? (\d+)(?: to (\d+))?(?:, in (\w+)\(\))? @@", place
    ).groups()
    begin, end = int(first) - 1, int(last or first)
    lines = script.splitlines()
    assert lines[begin:end] == [line[1:] for line in changed if not line.startswith("+")]
    at = begin + next(number for number, line in enumerate(changed) if line[:1] in ("+", "-"))
    above = re.findall(r"^def (\w+)", "\n".join(lines[: at + 1]), re.MULTILINE)
    assert above[-1:] == ([function] if function else [])
    lines[begin:end] = [line[1:] for line in changed if not line.startswith("-")]
    return "\n".join(lines) + "\n"


def do_tutorial() -> list[list[str]]:
    """Do what the tutorial says on two ranks, from its first page to the last.

    Return what each block of commands prints.
    """
    is_first = chainermn.create_communicator().rank == 0
    printed = []
    for _, kind, what in pages.tutorial():
        if kind == "run":
            printed.append([line for c in what.splitlines() for line in printed_by_command(c)])
        elif is_first:
            script = Path("train_single.py")
            script.chmod(0o644)  # a copy of a read-only checkout is read-only, too
            script.write_text(edit(pages.read(script), what))
    return printed


def shapes(lines: list[str]) -> Counter[str]:
    """Count lines, ignoring numbers and names of folders."""
    return Counter(
        " ".join(re.sub(r"/[^ {]+/", "FOLDER/", re.sub(r"\d[\d.]*", "#", line)).split())
        for line in lines
    )


def rows(lines: list[str]) -> list[list[str]]:
    """Return the numbers in each line that reports an epoch."""
    return [line.split() for line in lines if re.match(r"\d+ ", line)]


@mpi(2)
def test_tutorial_goes_through_as_written(top):
    both, copied, step1, step2, resumed, narrow, from_file = do_tutorial()
    header, row = pages.printed_by(pages.marked("run: tutorial")[0])[::-1]
    assert both.count(header) == 2
    assert [len(numbers) for numbers in rows(both)] == 2 * [len(row.split())]
    assert copied == []
    # One process and two ranks print the table once each; in step 1, both ranks print it.
    assert shapes(step1) == shapes(both)
    # Both print the same numbers, except for the time.
    *_, one, other = (numbers[:-1] for numbers in rows(step1))
    assert one == other
    # All lines of one process, and the number of ranks.
    alone = [line for line in step2 if not line.startswith("ranks: ")]
    assert shapes(step2) + shapes(alone) == shapes(both)
    (going_on,) = pages.printed_by(pages.marked("run: tutorial")[4])
    assert resumed.count(going_on) == 1
    assert [numbers[0] for numbers in rows(resumed)] == ["1", "2"]
    assert [numbers[0] for numbers in rows(narrow)] == ["1"]
    assert [numbers[0] for numbers in rows(from_file)] == ["1", "2", "3"]


class Hunk(HTMLParser):
    """A change as the site shows it: the text to see, and the text that the button copies."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen = self.copied = ""
        self._only_seen: list[bool] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._only_seen.append(differences.ONLY_SEEN in dict(attributes)["class"].split())

    def handle_endtag(self, tag):
        self._only_seen.pop()

    def handle_data(self, data):
        self.seen += data
        self.copied += "" if any(self._only_seen) else data


def test_button_copies_the_lines_that_are_added(monkeypatch):
    """A browser presses it in ci/site."""
    old = "import os\n\n\ndef f(a):\n    b = a < 1\n    return b\n"
    new = 'import os\n\n\ndef f(a):\n    b = "$ &"\n    c = a < 2\n    return b\n'
    added = '    b = "$ &"\n    c = a < 2\n'
    signed = "".join(f"+{line}" for line in added.splitlines(keepends=True))
    changed = f"\n def f(a):\n-    b = a < 1\n{signed}     return b\n"
    hunk = Hunk(differences.inside(changed.splitlines()))
    assert hunk.copied == added
    assert hunk.seen == f" {changed}"
    assert edit(old, f"@@ train_single.py, lines 3 to 6, in f() @@\n{changed}") == new
    monkeypatch.setattr(sys, "path", sys.path[:])
    selectors = runpy.run_path(str(DOCS / "conf.py"))["copybutton_exclude"].split(", ")
    assert f".{differences.ONLY_SEEN}" in selectors


# The lines that the README adds to a script

AT_FIRST = """
import os
import sys

import chainer
import numpy as np
from chainer.training import extensions


def loss(x):
    return -chainer.functions.mean(model(x))


def report_process(x):
    chainer.report({"process": os.getpid()}, model)


model = chainer.links.Linear(1, 1, initialW=0, nobias=True)
optimizer = chainer.optimizers.SGD(lr=1)
train = np.arange(10, dtype=np.float32).reshape(10, 1)
validation = np.arange(7)
examples = chainer.iterators.SerialIterator(train, 10, repeat=False, shuffle=False)
evaluator = extensions.Evaluator(examples, model, eval_func=report_process)
"""
THEN = """
optimizer.setup(model)
batches = chainer.iterators.SerialIterator(train, len(train))
updater = chainer.training.StandardUpdater(batches, optimizer, loss_func=loss)
trainer = chainer.training.Trainer(updater, (3, "iteration"), out=sys.argv[1])
trainer.extend(evaluator, trigger=(3, "iteration"))
"""
AT_LAST = """
trainer.run()
has_log = "extensions/LogReport/_log" in chainer.serializers.npz.serialize(trainer)
print(f"rank {comm.rank}: {len(train)} and {len(validation)} examples, log: {has_log}")
print("weight:", model.W.array.item())
print("process:", trainer.observation["validation/main/process"])
"""


@mpi(2)
def test_lines_of_the_readme_make_a_script_distributed(top, monkeypatch):
    (block,) = (b for b in pages.blocks(ROOT / "README.md") if b.language == "python")
    setup, condition, reports = block.text.partition("if comm.rank == 0:")
    script = AT_FIRST + setup + THEN + condition + reports + AT_LAST
    monkeypatch.setattr(sys, "argv", ["script.py", "result"])
    *processes, with_log, without, weight, other_weight = lines_of(lambda: exec(script, {}))
    assert processes[0] == processes[1]  # the mean of both
    assert with_log == "rank 0: 5 and 4 examples, log: True"
    assert without == "rank 1: 5 and 3 examples, log: False"
    # The ranks' mean gradient is minus the mean of 0 to 9. The first update takes no step.
    assert (weight, other_weight) == ("weight: 9.0", "weight: 9.0")


# Examples that pages include


@mpi(2)
def test_checkpoints_go_on_after_a_crash(top, monkeypatch):
    script = EXAMPLES / "checkpoints.py"

    def train_and_crash() -> None:
        with contextlib.redirect_stderr(io.StringIO()), pytest.raises(ZeroDivisionError):
            run_script(script, "a", "12")

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", lambda code: code / 0)  # instead of ending the process
        assert lines_of(train_and_crash) == ["resuming after iteration 0"]
    assert lines_here(script, "a", "1000") == ["resuming after iteration 10"]
    assert lines_here(script, "b", "1000") == ["resuming after iteration 0"]
    assert Path("a/weights.npy").read_bytes() == Path("b/weights.npy").read_bytes()


# Runs a script several times in one job.
RESUME = """
import runpy, sys

def run(*arguments):
    sys.argv[1:] = arguments
    runpy.run_path({script!r}, run_name="__main__")

sys.path[0] = {folder!r}
run("killed", "--kill-in", "12")
try:
    run("stopped", "--stop-in", "12")
except SystemExit as end:
    print(f"ended with {{end.code}}")
run("stopped")
run("plain")
"""


def test_a_killed_job_is_restarted_and_ends_as_if_nothing_had_happened(tmp_path):
    code = RESUME.format(script=str(EXAMPLES / "resume.py"), folder=str(EXAMPLES))
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    command = "chainermn launch -n 2 --max-restarts 1 script.py"
    shown = run_in_shell(command, tmp_path, direct_environment())
    assert "attempt 1 of 2 ended" in shown
    assert shown.count("ended with 75") == 2
    assert shown.count("finished after iteration 40") == 3
    killed, stopped = re.findall(r"resuming after iteration (\d+), epoch \d, from (\w+)/", shown)
    written = re.findall(r"got SIGUSR1: the checkpoint of iteration (\d+) is written", shown)
    assert (killed, stopped) == (("10", "killed"), (*written, "stopped"))
    outs = "killed", "stopped", "plain"
    weights = {(tmp_path / out / "weights.npy").read_bytes() for out in outs}
    assert len(weights) == 1


@mpi(3)
def test_another_number_of_ranks(top, monkeypatch):
    comm = chainermn.create_communicator()
    script = EXAMPLES / "another_number_of_ranks.py"
    two = comm.split(comm.rank // 2, comm.rank)

    def on_two_ranks() -> None:
        if comm.rank < 2:
            run_script(script, "out", "2")

    with monkeypatch.context() as patch:
        patch.setattr(chainermn, "create_communicator", lambda: two)
        # The very first update makes the ranks equal and takes no step.
        assert lines_of(on_two_ranks) == ["epoch 2, step 19 of the optimizer"]
    assert lines_here(script, "out", "4") == ["epoch 4, step 33 of the optimizer"]


@mpi(2)
def test_what_makes_an_exchange_faster(top):
    # Mean gradients are 1.5 and the rate is 1/4. The first update takes no step, and with double
    # buffering the second one has no gradients yet.
    steps = {"plain": 3, "overlap": 3, "half": 3, "double buffering": 2}
    lines = lines_here(EXAMPLES / "faster.py")
    assert lines == sorted(f"{name} {[-1.5 / 4 * n] * 3}" for name, n in steps.items())


@mpi(2)
def test_timelines_that_a_script_asks_for(top):
    out = top / "out"
    lines = lines_here(EXAMPLES / "timelines.py", out)
    for name, n_iterations in (("loop", 5), ("timeline", 3)):
        file = out / f"{name}.json"
        assert any(line.startswith(f"timeline of 2 ranks: {file}.") for line in lines)
        shown = CliRunner().invoke(report, [str(file)])
        assert shown.output.startswith(f"ms per iteration, mean of {n_iterations}"), shown.output
    log = json.loads((out / "log").read_text())
    assert all(0 < row["parallel efficiency"] < 1 for row in log)


@mpi(2)
def test_evaluator_of_ones_own(top):
    assert lines_here(EXAMPLES / "own_evaluator.py") == ["120 examples"]


@mpi(2)
def test_fine_tuning_on_few_examples_is_better_than_training_on_them(top):
    lines = lines_here(EXAMPLES / "fine_tuning.py", "weights")
    pattern = r"([\w ]+): (\d+)% right, first layer changed by (\S+)"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    accuracy = {name: int(percent) for name, percent, _ in found}
    change = {name: float(number) for name, _, number in found}
    assert accuracy["from scratch"] < 75 < min(accuracy["frozen body"], accuracy["slow body"])
    assert change["frozen body"] == 0 < change["slow body"] < 0.1 < change["from scratch"]


# Both change their process for good.
TWO_EXAMPLES = """
import sys
sys.path[0] = {folder!r}
import multiprocess_iterator, two_step_communicator

if __name__ == "__main__":
    multiprocess_iterator.main()
    two_step_communicator.main()
"""


def test_worker_processes_under_mpi_and_a_new_communicator(tmp_path):
    """The library's tests run the communicator with other dtypes and kinds of memory."""
    script = tmp_path / "script.py"
    script.write_text(TWO_EXAMPLES.format(folder=str(EXAMPLES)), encoding="utf-8")
    batches = ["[[0, 1, 2], [3, 4, 5]]", "[[6, 7, 8], [9, 10, 11]]"]
    assert lines_of_job(2, script, cwd=tmp_path) == [*batches, "exact", "exact"]


def test_batch_script_is_queued_again_if_training_was_stopped(tmp_path):
    """Run it with stubs; ci/slurm runs it under Slurm."""
    stubs = {
        ".venv/bin/activate": "",
        "bin/scontrol": '#!/bin/sh\necho "$*"\n',
        "bin/chainermn": '#!/bin/sh\necho "$*"\nexit 75\n',
    }
    for name, text in stubs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    script = ["bash", EXAMPLES / "train.sbatch"]
    ended = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "")
    launch, requeue = ended.stdout.splitlines()
    assert requeue == "requeue 7"
    assert launch == "launch --max-restarts 3 train.py"


# Names and files


def public_names() -> set[str]:
    """Return what can be imported from each public module, as ``chainermn.links.N``."""
    modules = [
        "",
        ".agreement",
        ".communicators",
        ".datasets",
        ".extensions",
        ".functions",
        ".iterators",
    ]
    modules += [".launch", ".links", ".optimizers", ".testing"]
    names = set()
    for suffix in modules:
        module = importlib.import_module(f"chainermn{suffix}")
        for name in module.__all__:
            is_module = isinstance(getattr(module, name), ModuleType)
            names.add(f"chainermn.{name}" if is_module else name)
    return names


def test_every_public_name_is_in_the_reference():
    text = "\n".join(pages.read(page) for page in (DOCS / "api").glob("*.md"))
    documented = {name.split(".")[-1] for name in re.findall(r":: (chainermn[\w.]*)", text)}
    documented |= set(re.findall(r"chainermn\.\w+", text))
    assert public_names() - documented == set()


def test_every_public_name_is_in_the_readme_of_the_library():
    readme = pages.read(ROOT / "libs/chainermn/README.md")
    named = set(re.findall(r"\w+", " ".join(re.findall("`([^`]+)`", readme))))
    base = importlib.import_module("chainermn").CommunicatorBase
    names = {name.split(".")[-1] for name in public_names()}
    names |= {name for name in dir(base) if not name.startswith("_")}
    assert names - named == set()


def test_import_brings_the_submodules_that_the_reference_names():
    modules = set(re.findall(r"`(chainermn\.\w+)`", pages.read(DOCS / "api/index.md")))
    script = f"import chainermn\nfor name in {sorted(modules - {'chainermn.testing'})}: eval(name)"
    assert len(modules) > 10
    subprocess.run([sys.executable, "-c", script], check=True)


def test_table_of_communicators_says_what_their_classes_say():
    rows = [
        f"| `{name}` | {kind.__doc__.splitlines()[0]} |\n" for name, kind in registered().items()
    ]
    head = "| name | how gradients are averaged |\n|---|---|\n"
    assert head + "".join(rows) + "\n" in pages.read(DOCS / "api/choosing.md")


def test_communicators_that_pages_choose_are_registered():
    text = "\n".join(pages.read(page) for page in [*pages.PAGES, *pages.READMES])
    names = set(re.findall(r"""(?:--communicator |create_communicator\(["'])(\w+)""", text))
    names -= {"two_step"}  # which the page itself registers
    advice = pages.read(DOCS / "api/choosing.md").partition("## All of them")[0]
    names |= set(re.findall(r"\| `(\w+)`", advice))
    assert {"dummy", "single_node"} <= names <= set(registered())


def test_every_environment_variable_is_on_the_page():
    files = (ROOT / "libs").glob("*/src/**/*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    pattern = r"CHAINER(MN|_COMPAT)_[A-Z_]+|\w+_NUM_THREADS|MALLOC_\w+_|GLIBC_TUNABLES"
    names = {text for text in texts if re.fullmatch(pattern, text)} - {JOB_VARIABLE}
    page = pages.read(DOCS / "api/command.md")
    assert "CHAINERMN_STALL_LIMIT" in names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_names_that_differ_from_the_original_are_on_the_page():
    tests = load(ROOT / "libs/chainermn/tests/test_original_names.py")
    # Classes are known by their names, wherever they are defined.
    names = {re.sub(r"^chainermn\.([a-z_.]+\.(?=[A-Z]))?", "", name) for name in tests.EXCEPTIONS}
    page = pages.read(DOCS / "migrating/from_chainermn.md")
    table = page.partition("### Names that differ")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert sorted(re.findall("`([^`]+)`", " ".join(rows))) == sorted(names)


def test_every_line_of_the_doctor_is_explained():
    page = pages.read(DOCS / "troubleshooting.md")
    lines = re.findall("^[✓✗–] (.{26})", page, re.MULTILINE)  # noqa: RUF001
    shown = {line.strip() for line in lines}
    names = {check.name for check in CHECKS}
    assert shown - names == set()
    assert {name for name in names - shown if f"`{name}`" not in page} == set()


# Messages, word for word

GAP = "\0"  # in place of values that a message gets when it is made


def words(node: ast.AST) -> str:
    """Return the text that an expression makes, with gaps for values."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"\{\w+(:\w+)?\}", GAP, text)
        case ast.JoinedStr(values=parts):
            return "".join(map(words, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return words(left) + words(right)
    return GAP


def texts_of(library: str) -> set[str]:
    """Return all texts in a library's source, and their lines, with single spaces."""
    files = (ROOT / "libs" / library / "src").rglob("*.py")
    found = {words(node) for file in files for node in ast.walk(ast.parse(file.read_bytes()))}
    return {" ".join(text.split()) for whole in found for text in (whole, *whole.splitlines())}


def is_said(line: str, texts: set[str]) -> bool:
    """Tell whether one of the texts makes a line, without most of it coming from gaps."""
    said = re.sub(r"^(chainermn|\w+Error): ", "", " ".join(line.split()))
    least = 4 if line.startswith(" ") else 0.3 * letters(said)  # indented: calls and places
    # Few texts have all their parts there, and compiling an expression for each takes long.
    parts = (t.split(GAP) for t in texts)
    alike = (p for p in parts if all(part in said for part in p) and letters(GAP.join(p)) >= least)
    return any(re.fullmatch(".+".join(map(re.escape, p)), said) for p in alike)


def letters(text: str) -> int:
    return len(re.findall("[a-zA-Z]", re.sub(r"\S*/\S*", "", text)))  # except those of paths


def findings(block: str) -> Iterator[str]:
    """Yield the bad findings and the remedies in the doctor's output, without commands."""
    block = re.sub(r"^ +\$ .*\n?", "", block, flags=re.MULTILINE)
    for entry in re.split("^[✓–] .*|^✗ ", block, flags=re.MULTILINE):  # noqa: RUF001
        name, _, text = " ".join(entry[:26].split()), "", " ".join(entry[26:].split())
        found, _, remedy = text.partition(" → ")
        if name:
            yield found
        if remedy:
            yield remedy


def test_messages_are_those_of_the_library():
    texts = texts_of("chainermn")
    marked = pages.marked("doctor|said by chainermn")
    assert len(marked) > 10
    for block in marked:
        lines = findings(block.text) if block.mark == "doctor" else block.text.splitlines()
        for line in lines:
            if not line.startswith(("node", "numpy: node")):  # facts of the hosts
                assert is_said(line, texts), (str(block), line)
    page = pages.read(DOCS / "troubleshooting.md")
    headings = re.findall(r"^### (.+)\n\nPrinted by ChainerMN", page, re.MULTILINE)
    assert len(headings) > 4
    for heading in headings:
        assert any(re.sub(r"\d+", GAP, heading) in text for text in texts), heading


def test_reasons_against_cuda_graphs_are_those_of_the_library():
    texts = texts_of("chainer_fast")
    page = pages.read(DOCS / "guides/cuda_graphs.md")
    table = page.partition("| reason | cause |")[2].partition("\n\n")[0]
    reasons = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(reasons) > 9
    assert [reason for reason in reasons if not is_said(reason, texts)] == []


def test_files_that_pages_name_are_there():
    missing = []
    for page in pages.PAGES:
        for name in re.findall(r"`((?:apps|benchmarks|ci|docs|libs)/[\w./-]+)`", pages.read(page)):
            if not (ROOT / name).exists():
                missing.append(f"{page.relative_to(DOCS)}: {name}")
    assert missing == []


def test_what_was_not_run_on_a_gpu_is_said_in_one_place():
    """It is said in ``docs/gpu_status.md``: one place to update once something has been run."""
    sentence = re.compile(
        r"\b([Nn]ot|[Nn]ever|[Nn]othing|[Nn]one|[Nn]obody)\b[^.|]{0,80}\b(run|tried|tested)\b"
        r"( yet)? on (one yet|((a|any|real) )*GPUs?\b)|--gpu`* (was|has) (not|never)\b"
    )
    folders = (ROOT / name for name in ("apps", "benchmarks", "ci", "docs", "libs"))
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in files
        if path.suffix in (".md", ".py", ".ipynb")
        and not {"_build", "jupyter_execute", "results"} & set(path.parts)
        and (match := sentence.search(" ".join(pages.read(path).split())))
    }
    assert found.keys() == {"docs/gpu_status.md"}, found
    (line,) = re.findall(r".*gpu_status\.md.*", pages.read(ROOT / "README.md"))
    assert "what is still open" in line


def test_sessions_of_nox_are_there():
    tree = ast.parse((ROOT / "noxfile.py").read_bytes())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for page in [*pages.PAGES, *pages.READMES]:
        commands = re.findall(r"\bnoxw? (-[^`#\n]*)", pages.read(page))
        for command in (command.partition(" -- ")[0] for command in commands):
            named = re.findall(r"-s ((?:\w+ ?)+)", command) + re.findall(r'-k "(\w+)', command)
            assert set(" ".join(named).split()) <= sessions, (page, command)
            assert not (" -k " in f" {command}" and "-s " in command), (page, command)
