"""Whatever happens to a rank, the job ends, says why, and leaves nothing behind."""

import signal
import socket
import time
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  - its very first import writes to standard error
import psutil
import pytest

from chainermn.testing.mpiexec import Job, JobResult, run_job

pytestmark = pytest.mark.each_mpi

HERE = Path(__file__).resolve().parent
HOST = socket.gethostname()
TRAIN = [HERE / "train.py", "--epoch", "100000", "--unit", "20"]
# Generous, because the machine may be busy; jobs that hang are killed.
TIMEOUT = 100.0

# Limits the size of files, like a full disk, once MPI has the files that it needs.
WITH_SMALL_FILES = """
import resource, runpy, sys
import chainermn
create = chainermn.create_communicator

def create_and_limit(*arguments):
    communicator = create(*arguments)
    sys.dont_write_bytecode = True  # Python 3.11 would keep what is cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))
    return communicator

chainermn.create_communicator = create_and_limit
del sys.argv[0]
sys.path[0] = {here!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Runs the script named in its arguments; rank 1 exits after ten iterations.
WITH_EXIT = """
import runpy, sys
from chainer.training import StandardUpdater
update = StandardUpdater.update

def update_or_exit(self):
    update(self)
    if self.iteration == 10 and self.get_optimizer("main").communicator.rank == 1:
        sys.exit()

StandardUpdater.update = update_or_exit
del sys.argv[0]
sys.path[0] = {here!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(out: Path, **env: str) -> Job:
    """Start training, and return once there is a snapshot."""
    job = Job(2, [*TRAIN, "--out", out], cwd=out.parent, env=env)
    deadline = time.monotonic() + TIMEOUT
    while not any(out.glob("snapshot_iter_*")):
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(job.kill())
        time.sleep(0.05)
    return job


def rank_1(job: Job) -> psutil.Process:
    (found,) = (
        process
        for process in job.processes()
        if process.cmdline()[1:2] == [str(TRAIN[0])]
        and "1" in map(process.environ().get, ("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    )
    return found


def assert_ended(result: JobResult) -> None:
    assert not result.timed_out, result
    assert result.returncode != 0, result
    assert result.left_behind == [], result


def test_disk_is_full_while_a_model_is_written(tmp_path):
    script = ["-c", WITH_SMALL_FILES.format(here=str(HERE)), *TRAIN, "--unit", "100"]
    result = run_job(2, [*script, "--out", tmp_path / "result"], timeout=TIMEOUT)
    assert_ended(result)
    assert f"chainermn: rank 0 of 2 on {HOST} failed" in result.stderr
    assert f"OSError: [Errno 27] File too large: '{tmp_path}/result/best.npz'" in result.stderr


@pytest.mark.nightly
def test_one_rank_exits(tmp_path):
    script = ["-c", WITH_EXIT.format(here=str(HERE)), *TRAIN, "--out", tmp_path / "result"]
    result = run_job(2, script, timeout=TIMEOUT)
    assert_ended(result)
    assert f"rank 1 on {HOST}" in result.stderr


@pytest.mark.nightly
def test_rank_is_killed(tmp_path):
    job = start(tmp_path / "result")
    rank_1(job).kill()
    result = job.wait(TIMEOUT)
    assert_ended(result)
    shown = result.stdout + result.stderr  # the MPI decides where mpiexec says it
    assert any(
        text in shown
        for text in (f"rank 1 on {HOST} (process", f"RUNNING AT {HOST}", f"on node {HOST} exited")
    )


@pytest.mark.nightly
def test_rank_stops_answering(tmp_path):
    job = start(tmp_path / "result", CHAINERMN_STALL_LIMIT="6")
    rank_1(job).suspend()
    result = job.wait(TIMEOUT)
    assert_ended(result)
    assert f"rank 1 on {HOST} (process " in result.stderr
    assert "has been silent for" in result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_mpiexec_gets_a_signal(number, tmp_path):
    job = start(tmp_path / "result")
    job.process.send_signal(number)
    assert_ended(job.wait(TIMEOUT))
