"""Ranks that start as daemons do, in folders with any file, and that fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from chainermn.testing.mpiexec import run_job
from libs.chainermn.tests.process.hidden_modules import hide_all_modules

pytestmark = pytest.mark.each_mpi

# Rank 1 ends early, which only the watch notices.
SCRIPT = """
import os, sys
if len(sys.argv) == 1:
    os.closerange(0, 3)
    os.execv(sys.executable, [sys.executable, __file__, "without streams"])
number = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
files = [open(f"../{number}.{name}", "w", buffering=1) for name in ("in", "out", "err")]

import multiprocessing, subprocess
import chainer, chainermn, numpy as np
from chainer.training import StandardUpdater, Trainer, extensions

def do_nothing():
    pass

def train(communicator):
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), communicator)
    optimizer.setup(chainer.links.Classifier(chainer.links.Linear(2)))
    examples = [(np.ones(2, "f"), np.int32(1))]
    iterator = chainer.iterators.SerialIterator(examples, 1)
    trainer = Trainer(StandardUpdater(iterator, optimizer), (2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.PrintReport(["main/loss"]))
    trainer.run()

communicator = chainermn.create_communicator("naive")
assert communicator.size == 2
chainermn.failures.at_end(lambda: files[1].write("at the end of the rank\\n"))
for code in 0, 3:
    child = os.fork()
    if not child:
        sys.exit(code)
    files[1].write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
    train(communicator)
process = multiprocessing.get_context("fork").Process(target=do_nothing)
process.start()
process.join()
subprocess.run(["true"], preexec_fn=do_nothing, check=True)
files[1].write(f"{process.exitcode}\\n")
train(communicator)
if communicator.rank == 1:
    sys.exit()
communicator.allreduce(np.ones(1, "f"))
"""


def test_daemon_in_a_folder_with_any_file_whose_children_end_as_they_like(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(SCRIPT)
    folder.mkdir()
    result = run_job(2, [script], cwd=hide_all_modules(folder), timeout=120)
    result.check(fails=True)
    written = {f"{rank}.{name}": "" for rank in range(2) for name in ("in", "err")}
    written |= {f"{rank}.out": "0\n3\n0\n" for rank in range(2)}
    assert {file.name: file.read_text() for file in tmp_path.glob("[01].*")} == written


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["import MPI", "import rc; rc.finalize = True"])
def test_child_of_a_rank_whose_mpi_is_finalized_by_mpi4py(first: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"from mpi4py {first}\n"
        "import chainermn\n"
        "communicator = chainermn.create_communicator('naive')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit()\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "codes = communicator.allgather_obj(code)\n"
        "if communicator.rank == 0:\n"
        "    print(codes)\n"
    )
    assert run_job(2, [script]).check().stdout == "[1, 1]\n"  # the children print notes


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_helpers_that_do_not_run(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, chainermn\n"
        f"sys.executable = {python!r}\n"
        "assert chainermn.create_communicator('naive').allgather_obj(1) == [1, 1]\n"
    )
    result = run_job(2, [script]).check(warns=True)
    (warning,) = [line for line in result.stderr.splitlines() if "UserWarning" in line]
    why = {
        "/bin/false": "chainermn-monitor has ended with exit code 1",
        "/nowhere/python": "cannot start chainermn-monitor: No such file or directory",
    }
    assert f": {why[python]}. If a rank fails in a way that MPI does not notice" in warning
