"""An uncaught exception on one rank ends the whole job."""

from __future__ import annotations

import functools
import os
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


# Without create_communicator: bare MPI in its place.
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


def test_alone_it_is_an_ordinary_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import chainermn\ncomm = chainermn.create_communicator('naive')\nraise ValueError('no')\n"
    )
    result = run_job(1, [script])
    assert result.returncode != 0
    assert "ValueError: no" in result.stderr
    assert "chainermn: rank" not in result.stderr


def test_failure_before_mpi_is_initialised(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # One rank only: what Python prints by itself comes in pieces, and two ranks' would mix.
    script.write_text(
        "import os\nimport chainermn.global_except_hook\n"
        "chainermn.global_except_hook.add_hook()\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "if rank == '1':\n"
        "    raise ValueError('early')\n"
    )
    result = run_job(2, [script])
    assert not result.timed_out
    assert result.returncode != 0
    assert "ValueError: early" in result.stderr


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


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Let this process seem to be rank 2 of 3, which nothing ends; return how it would be."""
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
    assert how == {"after": 0.06, "announce": global_except_hook.failures.say_failing}


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
