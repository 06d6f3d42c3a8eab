"""One script, run several times by the same ranks."""

import re

import pytest

from chainermn.testing.in_turn import run_in_turn

SCRIPT = """
import sys
from mpi4py import MPI
import beside

rank = MPI.COMM_WORLD.rank
beside.runs.append(sys.argv[1])
what, *rest = sys.argv[1:]
print(what, rank, len(beside.runs), rest)
if what == "message":
    raise SystemExit("error: not so" if rank == 0 else 1)
if what == "code":
    sys.exit(rank * 3)
if what == "odd":
    sys.exit(True if rank == 0 else -254)
if what == "raises" and rank == 1:
    raise ValueError("only here")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("runs = []\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_each_run_has_its_own_output_and_exit_code(script, tmp_path):
    cases = [["ends", 1, tmp_path], ["message"], ["code"], ["odd"], ["ends"]]
    jobs = run_in_turn(2, script, cases, cwd=tmp_path)
    assert [job.returncode for job in jobs] == [0, 1, 3, 2, 0]
    assert [job.stderr for job in jobs] == ["", "error: not so\n", "", "", ""]
    for number, (job, case) in enumerate(zip(jobs, cases, strict=True), 1):
        what, *rest = map(str, case)
        assert sorted(job.stdout.splitlines()) == [f"{what} {r} {number} {rest}" for r in (0, 1)]


def test_run_that_ends_the_job_is_named(script):
    message = f"{script} raises 7 did not end on every rank:\n"
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
        run_in_turn(2, script, [["ends"], ["raises", 7], ["ends"]], timeout=300)
    assert "raises 1 2 ['7']" in str(caught.value)
