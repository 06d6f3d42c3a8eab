"""Jobs that must make room: they write a checkpoint, and continue when Slurm restarts them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import mpi_flavor
from ci.slurm.jobs import BatchJob, run
from ci.slurm.test_launch import LAUNCH

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(Path(__file__).resolve().parent / "scripts/train.py")
DOCUMENTED = ROOT / "docs/examples/train.sbatch"
REQUEUED_IF_STOPPED = '[ $? != 75 ] || scontrol requeue "$SLURM_JOB_ID"'

Submit = Callable[..., BatchJob]


def check_that_it_went_on(job: BatchJob, ranks: int) -> None:
    """Check that a job was stopped, started again from its checkpoint, and ran to its end."""
    record = job.wait()
    assert record["Restarts"] == "1"
    output = job.output()
    (stopped,) = re.findall(r"got SIGUSR1: the checkpoint of iteration (\d+) is written", output)
    begins = [int(n) for n in re.findall(rf"{ranks} ranks begin after iteration (\d+)", output)]
    assert begins == [0, int(stopped)], output
    assert f"finished: 3 iterations from {stopped}\n" in output


def test_signal_to_ranks_of_srun(submit: Submit, srun: Sequence[str]) -> None:
    """The signal reaches all processes of all ranks, including those that watch them."""
    line = shlex.join([*srun, sys.executable, TRAIN])
    job = submit(
        f"{line}\n{REQUEUED_IF_STOPPED}",
        "--nodes=3",
        "--ntasks=4",
        "--requeue",
        "--open-mode=append",
    )
    job.wait_for("one iteration")
    run("scancel", "--signal=USR1", str(job.id))
    check_that_it_went_on(job, 4)


@pytest.fixture
def documented(shared_path: Path) -> Path:
    """Return the batch script of the documentation, with another program that trains."""
    (shared_path / ".venv/bin").mkdir(parents=True)
    line = f'chainermn() {{ exec {shlex.join(LAUNCH[:-1])} "$@"; }}'
    (shared_path / ".venv/bin/activate").write_text(line)
    text = DOCUMENTED.read_text()
    assert text.count(" train.py ") == 1
    script = shared_path / "train.sbatch"
    script.write_text(text.replace(" train.py ", f" {TRAIN} "))
    return script


def test_documented_script(submit: Submit, documented: Path) -> None:
    job = submit(documented)
    job.wait_for("one iteration")
    run("scancel", "--batch", "--signal=USR1", str(job.id))
    check_that_it_went_on(job, 4)


def test_time_limit(submit: Submit, documented: Path) -> None:
    """Slurm sends the signal a minute before the limit, or up to half a minute earlier."""
    job = submit(documented, "--time=4", "--signal=B:USR1@60")
    check_that_it_went_on(job, 4)


@pytest.mark.skipif(mpi_flavor() == "openmpi", reason="its mpiexec ends the ranks at once")
def test_cancelled_documented_script(submit: Submit, documented: Path) -> None:
    check_checkpoint_of_cancelled(submit(documented))


def test_cancelled_ranks_of_srun(submit: Submit, srun: Sequence[str]) -> None:
    line = shlex.join([*srun, sys.executable, TRAIN])
    check_checkpoint_of_cancelled(submit(line, "--nodes=3", "--ntasks=4"))


def check_checkpoint_of_cancelled(job: BatchJob) -> None:
    """Cancel a job that trains, and check that it writes a checkpoint before it ends."""
    job.wait_for("one iteration")
    run("scancel", str(job.id))
    job.wait(state="CANCELLED")
    assert re.search(r"got SIGTERM: the checkpoint of iteration \d+ is written", job.output())


def test_array(submit: Submit, shared_path: Path) -> None:
    """Each task is a job of its own, and these two run at the same time."""
    lines = [
        "touch running-$SLURM_ARRAY_TASK_ID",
        "until [ -e running-$((1 - SLURM_ARRAY_TASK_ID)) ]; do sleep 0.1; done",
        f"{shlex.join([*LAUNCH, TRAIN])} out-$SLURM_ARRAY_TASK_ID $((5 + SLURM_ARRAY_TASK_ID))",
    ]
    job = submit("\n".join(lines), "--array=0-1", "--nodes=2", "--ntasks=3")
    job.wait()
    for task in (0, 1):
        expected = [
            "3 ranks begin after iteration 0",
            "one iteration",
            f"finished: {5 + task} iterations from 0",
        ]
        assert job.output(task).splitlines() == expected
