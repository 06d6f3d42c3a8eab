"""An uncaught exception on one rank ends the whole job."""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn import global_except_hook
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


def fail(tmp_path: Path, before: str, ranks: int = 3, **env: str) -> JobResult:
    script = tmp_path / "script.py"
    script.write_text(WAITS_FOR_A_RANK_THAT_FAILS.format(before=before))
    return run_job(ranks, [script], env=env)


# Bare MPI in place of create_communicator.
BARE_MPI = """
import chainermn.global_except_hook
from mpi4py import MPI
class comm:
    rank = MPI.COMM_WORLD.rank
    recv_obj = staticmethod(lambda source: MPI.COMM_WORLD.recv(source=source))
"""

HOOKED = {
    "by create_communicator": (
        "import chainermn\ncomm = chainermn.create_communicator('naive')",
        {},
    ),
    "by add_hook": (BARE_MPI + "chainermn.global_except_hook.add_hook()", {}),
    "from outside": (BARE_MPI, {"CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS": "1"}),
    "by the other name": (BARE_MPI, {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1"}),
}


@pytest.mark.parametrize("how", HOOKED)
def test_one_rank_fails(tmp_path: Path, how: str) -> None:
    before, env = HOOKED[how]
    result = fail(tmp_path, before, **env)
    assert not result.timed_out
    assert result.returncode != 0
    assert result.left_behind == []
    assert result.stderr.count("RuntimeError: this went wrong") == 1
    assert "chainermn: rank 1 of 3 on " in result.stderr
    assert 'raise RuntimeError("this went wrong")' in result.stderr
    assert "before the failure" in result.stdout


def test_a_gpu_that_is_not_there_has_a_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import chainermn\n"
        "comm = chainermn.create_communicator('naive')\n"
        "class CUDARuntimeError(RuntimeError): pass\n"
        "raise CUDARuntimeError('cudaErrorInvalidDevice: invalid device ordinal')\n"
    )
    for ranks in (1, 2):
        result = run_job(ranks, [script])
        assert result.returncode != 0
        assert result.stderr.count("Use chainermn.choose_device(comm) instead") == 1, result


def test_alone_it_is_an_ordinary_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import chainermn\ncomm = chainermn.create_communicator('naive')\nraise ValueError('no')\n"
    )
    result = run_job(1, [script])
    assert result.returncode != 0
    assert "ValueError: no" in result.stderr
    assert "chainermn: rank" not in result.stderr


EXITS = """
import chainermn
comm = chainermn.create_communicator("naive")
if comm.rank in {failing}:
    chainermn.global_except_hook.exit_job("x.jpg is damaged")
comm.allreduce_obj(1)
"""


@pytest.mark.parametrize(("ranks", "failing"), [(1, [0]), (2, [1]), (3, [0, 1, 2])])
def test_exit_of_the_whole_job_is_one_line(tmp_path: Path, ranks: int, failing: list[int]) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXITS.format(failing=failing))
    result = run_job(ranks, [script], cwd=tmp_path)
    assert (result.timed_out, result.left_behind) == (False, []), result
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    by = rf" \(rank [0-2] of {ranks} on {socket.gethostname()} ends the job\)" if ranks > 1 else ""
    assert re.fullmatch(rf"error: x\.jpg is damaged{by}", line)


@pytest.mark.parametrize("how", ["by add_hook", "from outside"])
def test_failure_before_mpi_is_initialized(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    # Rank 0 makes no call in which it could notice.
    script.write_text(
        "import os, time, chainermn\n"
        + ("chainermn.global_except_hook.add_hook()\n" if how == "by add_hook" else "")
        + "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "if rank == '1':\n"
        "    raise ValueError('early')\n"
        "time.sleep(600)\n"
    )
    result = run_job(2, [script], env=HOOKED[how][1], timeout=100)
    assert (result.timed_out, result.left_behind) == (False, [])
    assert result.returncode != 0
    assert f"chainermn: rank 1 of 2 on {socket.gethostname()} failed" in result.stderr
    assert "ValueError: early" in result.stderr


def test_program_that_a_rank_starts_leaves_the_job_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, chainermn\n"
        "code = 'import chainermn; raise ValueError(\"in a program\")'\n"
        "assert subprocess.run([sys.executable, '-c', code]).returncode == 1\n"
        "comm = chainermn.create_communicator('naive')\n"
        "comm.allgather_obj(0)\n"
    )
    result = run_job(2, [script], env=HOOKED["from outside"][1])
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("ValueError: in a program") == 2
    assert "chainermn: " not in result.stderr


def test_child_of_a_rank_leaves_the_job_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, warnings, chainermn\n"
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
    result = run_job(2, [script])
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("ValueError: in the child") == 1


ALL_FAIL = """
import os, signal
import chainer, chainermn
def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = chainermn.create_communicator("naive")
    {fail}
main()
"""
RUN_TRAINER = """
    class Updater:
        iteration = 0
        get_all_optimizers = dict
        connect_trainer = finalize = lambda *_: None
        def update(self):
            self.iteration += 1
            if self.iteration == 7:
                os.kill(os.getpid(), signal.SIGINT)
    chainer.training.Trainer(Updater(), (10, "iteration")).run()
"""
LOOP = """
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
"""
HANDLE = """
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    except KeyboardInterrupt:
        print("handled", flush=True)
"""


def all_fail(tmp_path: Path, fail: str) -> tuple[JobResult, list[str]]:
    """Run a script on three ranks; return the result, and what chainermn and Python said."""
    script = tmp_path / "script.py"
    script.write_text(ALL_FAIL.format(fail=fail))
    result = run_job(3, [script], cwd=tmp_path)
    assert (result.timed_out, result.left_behind) == (False, []), result
    lines = result.stderr.splitlines()
    return result, [line for line in lines if re.match(r"chainermn: |Traceback|\w+Error", line)]


def test_what_all_ranks_raise_is_printed_once(tmp_path: Path) -> None:
    result, lines = all_fail(tmp_path, "raise ValueError('on all')")
    assert result.returncode != 0
    assert [line for line in lines if line != "ValueError: on all"] == [
        *(line for line in lines if " of 3 on " in line),
        "Traceback (most recent call last):",
    ]
    assert len(lines) == 3
    assert "Ranks that fail in the same way do not repeat this." in lines[0]


def test_what_ranks_raise_differently_is_printed_by_each(tmp_path: Path) -> None:
    _, lines = all_fail(tmp_path, "raise ValueError(f'on {comm.rank}')")
    assert {line for line in lines if "Error" in line} == {f"ValueError: on {r}" for r in range(3)}


@pytest.mark.parametrize(("how", "progress"), [(RUN_TRAINER, " after 7 iterations"), (LOOP, "")])
def test_interrupt_of_all_ranks_is_one_line(how: str, progress: str, tmp_path: Path) -> None:
    result, lines = all_fail(tmp_path, how)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = lines
    start = f"chainermn: interrupted (Ctrl-C){progress}: rank "
    assert line.startswith(start)
    assert re.fullmatch(
        rf"\d of 3 on {socket.gethostname()} was at {re.escape(str(tmp_path))}/script.py:\d+ in "
        r"(main|update)\. Ending the whole job\.",
        line.removeprefix(start),
    )


def test_interrupt_that_the_script_handles(tmp_path: Path) -> None:
    result, lines = all_fail(tmp_path, HANDLE)
    assert (result.returncode, lines) == (0, []), result
    assert result.stdout.count("handled") == 3


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Make this process look like rank 2 of 3; return a list of what would end the job."""
    calls: list[tuple[str, dict[str, Any]]] = []
    mpi = SimpleNamespace(
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
        COMM_WORLD=SimpleNamespace(rank=2, size=3),
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(global_except_hook, "_pid", os.getpid())
    monkeypatch.setattr(
        global_except_hook.failures, "end_job", lambda text, **how: calls.append((text, how))
    )
    return calls


def raised_by(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        function()
    return caught.value


def test_what_is_said_of_an_error(ends: list[tuple[str, dict[str, Any]]]) -> None:
    error = raised_by(lambda: int("many"))
    global_except_hook._abort_job(type(error), error, error.__traceback__)
    ((text, how),) = ends
    assert text.startswith(f"chainermn: rank 2 of 3 on {socket.gethostname()} failed; ")
    assert text.endswith("ValueError: invalid literal for int() with base 10: 'many'\n")
    assert "Traceback (most recent call last):" in text
    assert how["after"] == 0.06
    assert how["announce"]()  # without a watch, every rank says it


@pytest.mark.parametrize("owner", [None, SimpleNamespace(updater=None)])
def test_interrupt_of_what_is_no_trainer(
    owner: Any, ends: list[tuple[str, dict[str, Any]]]
) -> None:
    def run(self: Any) -> None:
        raise KeyboardInterrupt

    error = raised_by(lambda: run(owner))
    me = f"rank 2 of 3 on {socket.gethostname()}"
    for trace, was in ((error.__traceback__, f" was at {__file__}:"), (None, ". Ending ")):
        global_except_hook._abort_job(type(error), error, trace)
        assert ends[-1][0].startswith(f"chainermn: interrupted (Ctrl-C): {me}{was}")


def test_memory_of_failed_calls_is_given_back(ends: list[tuple[str, dict[str, Any]]]) -> None:
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
        global_except_hook._abort_job(kind, error, error.__traceback__)
        assert (held[-1]() is None) == (kind is MemoryError)
    assert ["in take\n" in text for text, _ in ends] == [True, True]
