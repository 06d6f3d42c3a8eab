"""An uncaught exception on one rank ends the whole job."""

from __future__ import annotations

from pathlib import Path

import pytest

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
