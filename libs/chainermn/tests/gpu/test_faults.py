"""Faults on a real GPU, and their messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from chainermn.testing.mpiexec import run_job
from chainermn.transport.gpu.device import the_gpu
from chainermn.transport.gpu.nccl import NcclTransport

pytestmark = pytest.mark.gpu
WORLD = MPI.COMM_WORLD


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("how", ["test", "wait"])
def test_fault_ends_the_job(how: str) -> None:
    """End the job instead of letting the rank poll forever."""
    result = run_job(2, [Path(__file__).parent / "fault.py", how], timeout=60)
    assert not result.timed_out
    assert result.returncode != 0
    assert "earlier work on the GPU of rank 1, on " in result.stderr
    assert "has failed: cudaErrorIllegalAddress: " in result.stderr


@pytest.mark.usefixtures("a_gpu")
def test_fault_that_shows_in_the_exchange_ends_the_job() -> None:
    result = run_job(2, [Path(__file__).parent / "fault.py", "exchange"], timeout=60)
    assert not result.timed_out
    assert result.returncode != 0
    assert "chainermn: rank 1 of 2 on " in result.stderr
    assert "an illegal memory access was encountered" in result.stderr


@pytest.mark.mpi(1, timeout=120)
@pytest.mark.usefixtures("with_nccl_for_two")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", "disappeared first, without a message"),
        ("raises", "RuntimeError: by design"),
        ("stopped", "silent for"),
    ],
)
def test_job_ends_if_a_rank_is_missing_from_nccl(how: str, text: str) -> None:
    script = Path(__file__).parent / "leave_nccl.py"
    result = run_job(2, [script, how], env={"CHAINERMN_STALL_LIMIT": "6"}, timeout=60)
    assert not result.timed_out, result.stderr
    assert result.returncode != 0
    assert result.left_behind == []
    assert "chainermn: rank 1 " in result.stderr
    assert text in result.stderr


def test_waiting_leaves_the_core_to_others(a_gpu: Any) -> None:
    a_gpu.hold(lambda: time.sleep(1))
    event = the_gpu().record()
    assert not event.Test()
    before = time.thread_time()
    event.Wait()
    assert time.thread_time() - before < 0.5
    assert event.Test()


@pytest.mark.mpi(1, 2, timeout=120)
@pytest.mark.usefixtures("with_nccl")
def test_every_error_of_nccl_has_a_name(a_gpu: Any) -> None:
    library = the_gpu().nccl()
    names = {5: "NCCL_ERROR_INVALID_USAGE", 6: "NCCL_ERROR_REMOTE_ERROR"}
    names |= {7: r"ncclInProgress \(7\)", 8: r"ncclTimeout \(8\)"}
    transport = NcclTransport(WORLD, the_gpu())

    def fail(status: int) -> None:
        raise library.NcclError(status)

    for status, name in names.items():
        with pytest.raises(RuntimeError, match=rf"a test on rank {WORLD.rank} of .*: {name}"):
            transport.check("a test", lambda status=status: fail(status))
    transport.close()  # aborts
    transport = NcclTransport(WORLD, the_gpu())
    ones = a_gpu.to_gpu(np.ones(3, "f"))
    transport.allreduce(ones)
    np.testing.assert_array_equal(a_gpu.to_host(ones), WORLD.size)
    assert transport.failure() is None
    transport.close()
    assert transport.failure() is None


@pytest.mark.mpi(1)
@pytest.mark.usefixtures("with_nccl")
def test_nccl_whose_calls_do_not_block() -> None:
    script = (
        "from mpi4py import MPI; import cupy; from chainermn.transport.gpu.device import the_gpu; "
        "from chainermn.transport.gpu.nccl import NcclTransport; "
        "NcclTransport(MPI.COMM_WORLD, the_gpu())"
    )
    result = run_job(1, ["-c", script], env={"NCCL_COMM_BLOCKING": "0"}, timeout=60)
    assert result.returncode != 0
    assert "ncclInProgress (7)" in result.stderr
    assert "unset NCCL_COMM_BLOCKING" in result.stderr
