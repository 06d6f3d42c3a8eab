"""Memory that a rank frees and allocates again."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from chainermn.testing.mpiexec import run_job

COUNTS_PAGE_FAULTS = """
import resource, sys
import numpy as np
import chainermn
comm = chainermn.create_communicator("naive")
np.ones(3_000_000, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    np.ones(3_000_000, np.uint8)
faults = comm.gather_obj(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
if comm.rank == 0:
    print(min(faults) // 50, max(faults) // 50)
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept(tmp_path: Path) -> None:
    _, most = page_faults(tmp_path, 2)
    assert most < 10  # out of the 733 pages of an array


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(
    "setting", ["MALLOC_MMAP_THRESHOLD_=65536", "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=65536"]
)
def test_settings_of_the_user_stand(tmp_path: Path, setting: str) -> None:
    variable, value = setting.split("=", 1)
    least, _ = page_faults(tmp_path, 1, **{variable: value})
    assert least > 100


def page_faults(tmp_path: Path, ranks: int, **env: str) -> tuple[int, int]:
    script = tmp_path / "script.py"
    script.write_text(COUNTS_PAGE_FAULTS)
    job = run_job(ranks, [script], env=env)
    assert job.returncode == 0, job.stderr
    least, most = map(int, job.stdout.split())
    return least, most
