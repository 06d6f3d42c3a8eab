"""Training resumes from the newest complete checkpoint, no matter when a rank is killed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from chainermn.testing.mpiexec import Job
from libs.chainermn.tests.failures.cases import wait_for

pytestmark = pytest.mark.each_mpi

SCRIPT = Path(__file__).parent / "train.py"
TIMEOUT = 100.0


def is_complete(file: Path) -> bool:
    try:
        with np.load(file, allow_pickle=True) as arrays:
            return all(arrays[name] is not None for name in arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False


def newest(kind: str, folder: Path, size: int) -> int:
    """Return the iteration of the newest checkpoint whose files are all complete, or 0."""
    found = [
        {
            int(iteration.name.split(".")[place])
            for iteration in folder.glob(pattern)
            if is_complete(iteration)
        }
        for pattern, place in (
            [(f"checkpoint.{rank}.*", 2) for rank in range(size)]
            if kind == "checkpoint"
            else [("snapshot.*.0", 1)]
        )
    ]
    return max(set.intersection(*found), default=0)


@pytest.mark.parametrize(
    ("kind", "sizes", "kills"),
    [
        # One file for any number of ranks.
        ("snapshot", [1, 2], 1),
        pytest.param("snapshot", [1, 2, 3], 25, marks=pytest.mark.nightly),
        # One file per rank. A test of checkpoints kills a job once.
        pytest.param("checkpoint", [2], 25, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(1800)
def test_killed_again_and_again(kind: str, sizes: list[int], kills: int, tmp_path: Path) -> None:
    choice = random.Random(kind)
    cut_off, size = 0, choice.choice(sizes)
    for _ in range(kills + 1):
        expected = newest(kind, tmp_path, size)
        size = choice.choice(sizes)
        job = Job(size, [SCRIPT, kind, tmp_path])
        wait_for(job, "goes on after", size, TIMEOUT)
        said = re.findall(r"process (\d+), goes on after (\d+)\.", job.output()[0])
        assert [int(iteration) for _, iteration in said] == [expected] * size
        while newest(kind, tmp_path, size) <= expected:
            assert job.process.poll() is None, job.output()
            time.sleep(choice.uniform(0, 0.1))
        time.sleep(choice.uniform(0, 0.7))
        os.kill(int(choice.choice(said)[0]), signal.SIGKILL)
        result = job.wait(TIMEOUT)
        assert not result.timed_out, result
        assert (result.returncode != 0, result.left_behind) == (True, []), result
        assert "Traceback" not in result.stderr, result  # the kill is the only failure
        unfinished = [path for path in tmp_path.iterdir() if not path.name.startswith(kind)]
        cut_off += bool(unfinished)
        for path in unfinished:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert expected > 0
    if kills > 1:
        assert cut_off > 0  # some ranks were killed while writing
