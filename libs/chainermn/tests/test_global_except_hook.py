"""An uncaught exception on one rank ends the whole job."""

from __future__ import annotations

import functools
import re
import socket
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chainer
import pytest

from chainermn import failures, global_except_hook
from chainermn.testing.mpiexec import JobResult, run_job

pytestmark = pytest.mark.each_mpi

WAITS_FOR_A_RANK_THAT_FAILS = """
import sys
{before}
if comm.rank == 1:
    print("before the failure")
    raise RuntimeError("this went wrong")
comm.recv_obj(1)
"""


# Bare MPI in place of create_communicator.
BARE_MPI = """
import chainermn.global_except_hook
from mpi4py import MPI
class comm:
    rank = MPI.COMM_WORLD.rank
    recv_obj = staticmethod(lambda source: MPI.COMM_WORLD.recv(source=source))
"""

BY_VARIABLE = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS": "1"}


@pytest.mark.parametrize(
    ("before", "env"),
    [
        ("import chainermn\ncomm = chainermn.create_communicator('naive')", {}),
        (BARE_MPI, {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1"}),
    ],
    ids=["by create_communicator", "by the other name"],
)
def test_one_rank_fails(tmp_path: Path, before: str, env: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS_FOR_A_RANK_THAT_FAILS.format(before=before))
    result = run_job(2, [script], env=env).check(fails=True)
    assert result.stderr.count("RuntimeError: this went wrong") == 1
    assert "chainermn: rank 1 of 2 on " in result.stderr
    assert 'raise RuntimeError("this went wrong")' in result.stderr
    assert "before the failure" in result.stdout


EXITS = """
import chainermn
comm = chainermn.create_communicator("naive")
chainermn.global_except_hook.exit_job("x.jpg is damaged")
"""


def test_exit_of_the_whole_job_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXITS)
    result = run_job(2, [script], cwd=tmp_path).check(fails=True)
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    by = rf"\(rank [01] of 2 on {socket.gethostname()} ends the job\)"
    assert len(lines) == 1, result
    assert re.fullmatch(rf"error: x\.jpg is damaged {by}", lines[0])


@pytest.mark.parametrize(
    ("before", "env"),
    [("chainermn.global_except_hook.add_hook()\n", {}), ("", BY_VARIABLE)],
    ids=["by add_hook", "from outside"],
)
def test_failure_before_mpi_is_initialized(
    tmp_path: Path, before: str, env: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    # Rank 0 makes no call in which it could notice.
    script.write_text(
        f"import os, time, chainermn\n{before}"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "if rank == '1':\n"
        "    raise ValueError('early')\n"
        "time.sleep(600)\n"
    )
    result = run_job(2, [script], env=env, timeout=100).check(fails=True)
    assert f"chainermn: rank 1 of 2 on {socket.gethostname()} failed" in result.stderr
    assert "ValueError: early" in result.stderr


def test_children_of_a_rank_leave_the_job_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, chainermn\n"
        "code = 'import chainermn; raise ValueError(\"in a program\")'\n"
        "assert subprocess.run([sys.executable, '-c', code]).returncode == 1\n"
        "comm = chainermn.create_communicator('naive')\n"
        "if comm.rank == 1:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            raise ValueError('in the child')\n"
        "        except ValueError:\n"
        "            sys.excepthook(*sys.exc_info())\n"
        "        os._exit(3)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n"
        "comm.allgather_obj(0)\n"
    )
    result = run_job(2, [script], env=BY_VARIABLE).check(warns=True)
    assert result.stderr.count("ValueError: in a program") == 2
    assert result.stderr.count("ValueError: in the child") == 1
    assert "chainermn: " not in result.stderr


ALL_FAIL = """
import os, signal
import chainermn
def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = chainermn.create_communicator("naive")
    {fail}
main()
"""
HANDLE_ONE_INTERRUPT = """
    for handled in (False, True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        except KeyboardInterrupt:
            if handled:
                raise
            print("handled", flush=True)
            comm.allgather_obj(0)
"""


def all_fail(tmp_path: Path, fail: str) -> tuple[JobResult, list[str]]:
    """Run a script on two ranks; return the result, and what chainermn and Python said."""
    script = tmp_path / "script.py"
    script.write_text(ALL_FAIL.format(fail=fail))
    result = run_job(2, [script], cwd=tmp_path).check(fails=True)
    lines = result.stderr.splitlines()
    return result, [line for line in lines if re.match(r"chainermn: |Traceback|\w+Error", line)]


def test_what_all_ranks_raise_is_printed_once(tmp_path: Path) -> None:
    _, lines = all_fail(tmp_path, "raise ValueError('on all')")
    assert [line for line in lines if line != "ValueError: on all"] == [
        *(line for line in lines if " of 2 on " in line),
        "Traceback (most recent call last):",
    ]
    assert len(lines) == 3
    assert "Ranks that fail in the same way do not repeat this." in lines[0]


def test_what_ranks_raise_differently_is_printed_by_each(tmp_path: Path) -> None:
    _, lines = all_fail(tmp_path, "raise ValueError(f'on {comm.rank}')")
    assert {line for line in lines if "Error" in line} == {"ValueError: on 0", "ValueError: on 1"}


def test_interrupt_of_all_ranks_is_one_line_unless_the_script_handles_it(tmp_path: Path) -> None:
    result, lines = all_fail(tmp_path, HANDLE_ONE_INTERRUPT)
    assert result.stdout.count("handled") == 2
    assert "Traceback" not in result.stderr
    (line,) = lines
    assert re.fullmatch(
        rf"chainermn: interrupted \(Ctrl-C\): rank \d of 2 on {socket.gethostname()} was at "
        rf"{re.escape(str(tmp_path))}/script.py:\d+ in main\. Ending the whole job\.",
        line,
    )


Ends = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make this process look like rank 2 of 3, with the hook; return its ``COMM_WORLD``."""
    world = SimpleNamespace(rank=2, size=3)
    mpi = SimpleNamespace(
        Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=world
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    global_except_hook.add_hook()
    return world


@pytest.fixture
def ends(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Return a list of what would end the job."""
    calls: Ends = []
    monkeypatch.setattr(failures, "end_job", lambda text, **how: calls.append((text, how)))
    return calls


def raised_by(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def leave_uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def test_what_is_said_of_an_error(ends: Ends) -> None:
    leave_uncaught(raised_by(lambda: int("many")))
    ((text, how),) = ends
    assert text.startswith(f"chainermn: rank 2 of 3 on {socket.gethostname()} failed; ")
    assert text.endswith("ValueError: invalid literal for int() with base 10: 'many'\n")
    assert "Traceback (most recent call last):" in text
    assert how["after"] == 0.06
    assert how["announce"]()  # without a watch, every rank says it


class CUDARuntimeError(RuntimeError):
    """What CuPy raises for a GPU that is not there."""

    status = 101


def test_a_gpu_that_is_not_there_has_a_remedy(ends: Ends) -> None:
    leave_uncaught(CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal"))
    assert ends[0][0].count("Use chainermn.choose_device(comm) instead") == 1


def test_alone_it_is_an_ordinary_traceback(
    world: SimpleNamespace, ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    world.rank, world.size = 0, 1
    error = raised_by(lambda: int("many"))
    leave_uncaught(error)
    leave_uncaught(CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal"))
    said = capsys.readouterr().err
    assert said.startswith("".join(traceback.format_exception(error)))
    assert said.count("Use chainermn.choose_device(comm) instead") == 1
    with pytest.raises(SystemExit, match=r"^error: x\.jpg is damaged$"):
        global_except_hook.exit_job("x.jpg is damaged")
    assert ends == []


def test_interrupt_of_a_trainer_tells_its_progress(ends: Ends) -> None:
    class Updater:
        iteration = 0
        get_all_optimizers = dict
        connect_trainer = finalize = lambda *_: None

        def update(self) -> None:
            self.iteration += 1
            if self.iteration == 7:
                raise KeyboardInterrupt

    trainer = chainer.training.Trainer(Updater(), (10, "iteration"))
    leave_uncaught(raised_by(trainer.run))
    ((text, _),) = ends
    start = "chainermn: interrupted (Ctrl-C) after 7 iterations: rank 2 of 3 on "
    assert text.startswith(f"{start}{socket.gethostname()} was at {__file__}:")
    assert text.endswith(" in update. Ending the whole job.")


@pytest.mark.parametrize("owner", [None, SimpleNamespace(updater=None)])
def test_interrupt_of_what_is_no_trainer(owner: Any, ends: Ends) -> None:
    def run(self: Any) -> None:
        raise KeyboardInterrupt

    error = raised_by(lambda: run(owner))
    me = f"rank 2 of 3 on {socket.gethostname()}"
    for trace, was in ((error.__traceback__, f" was at {__file__}:"), (None, ". Ending ")):
        sys.excepthook(type(error), error, trace)
        assert ends[-1][0].startswith(f"chainermn: interrupted (Ctrl-C): {me}{was}")


def test_memory_of_failed_calls_is_given_back(ends: Ends) -> None:
    class Large:
        pass

    held = []

    def take(kind: type[BaseException]) -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise kind

    for kind in (MemoryError, ValueError):
        error = raised_by(functools.partial(take, kind))
        assert held[-1]() is not None
        leave_uncaught(error)
        assert (held[-1]() is None) == (kind is MemoryError)
    assert ["in take\n" in text for text, _ in ends] == [True, True]
