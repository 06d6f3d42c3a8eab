"""NCCL's collectives and connections; MPI stands in for NCCL."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.testing.mpiexec import run_job
from chainermn.transport.gpu.nccl import NcclTransport, check_devices
from chainermn.transport.gpu.reducers import NcclReducer
from chainermn.transport.reducer import Steps, shard_bounds

WORLD = MPI.COMM_WORLD
SIZES = [0, 1, 2, 3, 4, 7, 12, 60]
DTYPES = [
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def parts(n: int, dtype: np.dtype) -> list[np.ndarray]:
    return [((np.arange(n) * (rank + 1)) % 5).astype(dtype) for rank in range(WORLD.size)]


def finish(steps: Steps) -> Any:
    with pytest.raises(StopIteration) as end:
        next(steps)  # nothing to wait for
    return end.value.value


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", DTYPES)
def test_allreduce(stand_in: Any, name: str) -> None:
    transport = NcclTransport(WORLD, stand_in)
    dtype = dtype_of(name)
    reductions = {"max": np.max, "min": np.min, "sum": np.sum, "prod": np.prod}
    if dtype.kind == "f" or name == "bfloat16":
        reductions["mean"] = np.mean
    for op, reduction in reductions.items():
        own = stand_in.to_gpu(parts(7, dtype)[WORLD.rank])
        transport.allreduce(own, op)
        expected = reduction([part.astype("f8") for part in parts(7, dtype)], axis=0)
        wide = "f8" if dtype.itemsize == 8 else "f4"
        np.testing.assert_array_equal(own, expected.astype(wide).astype(dtype))
        assert own.dtype == dtype


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("name", ["int8", "float16", "bfloat16", "float32", "float64"])
def test_parts_of_an_allreduce(stand_in: Any, name: str) -> None:
    transport = NcclTransport(WORLD, stand_in)
    dtype = dtype_of(name)
    for n in SIZES:
        everywhere = parts(n, dtype)
        total = sum(part.astype("f8") for part in everywhere).astype(dtype)
        root = n % WORLD.size

        own = stand_in.to_gpu(everywhere[WORLD.rank])
        transport.reduce(own, root)
        if WORLD.rank == root:
            np.testing.assert_array_equal(own, total)
        transport.bcast(own, root)
        np.testing.assert_array_equal(own, total)

        own = stand_in.to_gpu(everywhere[WORLD.rank])
        shard = transport.reduce_scatter(own)
        begin, end = shard_bounds(n, WORLD.size)[WORLD.rank]
        np.testing.assert_array_equal(shard, total[begin:end])
        transport.allgather(own)
        np.testing.assert_array_equal(own, total)


@pytest.mark.mpi(2, 3)
def test_messages(stand_in: Any) -> None:
    transport = NcclTransport(WORLD, stand_in)
    right, left = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    own = stand_in.to_gpu(np.arange(WORLD.rank + 3, dtype="c8"))
    into = stand_in.to_gpu(np.zeros(left + 3, "c8"))
    transport.sendrecv(own, right, into, left)
    np.testing.assert_array_equal(into, np.arange(left + 3))
    if WORLD.rank == 0:
        transport.send(own, 1)
    elif WORLD.rank == 1:
        first = stand_in.to_gpu(np.zeros(3, "c8"))
        transport.recv(first, 0)
        assert first.tolist() == [0, 1, 2]


@pytest.mark.mpi(1, 2, 3)
def test_reducer(stand_in: Any) -> None:
    reducer = NcclReducer(NcclTransport(WORLD, stand_in))
    size, rank = WORLD.size, WORLD.rank
    for n in SIZES:
        everywhere = [part.astype("f4") * size for part in parts(n, np.dtype("f4"))]
        mean = sum(everywhere) / np.float32(size)
        own = stand_in.to_gpu(everywhere[rank])
        finish(reducer.allreduce(own, size))
        np.testing.assert_array_equal(own, mean)
        own = stand_in.to_gpu(everywhere[rank])
        shard = finish(reducer.reduce_scatter(own, size))
        begin, end = shard_bounds(n, size)[rank]
        np.testing.assert_array_equal(shard, mean[begin:end])
        finish(reducer.allgather(own))
        np.testing.assert_array_equal(own, mean)
        own = stand_in.to_gpu(everywhere[rank])
        finish(reducer.reduce(own, size))
        finish(reducer.bcast(own))
        np.testing.assert_array_equal(own, mean)


@pytest.mark.mpi(3)
def test_only_the_ranks_of_the_group_connect(stand_in: Any) -> None:
    part = WORLD.Split(WORLD.rank == 1, WORLD.rank)
    if WORLD.rank != 1:
        own = stand_in.to_gpu(np.full(2, WORLD.rank, "f"))
        NcclTransport(part, stand_in).allreduce(own)
        assert own.tolist() == [2, 2]
    assert stand_in.library.open == (WORLD.rank != 1)
    part.Free()


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("where", ["get_unique_id", "NcclCommunicator"])
@pytest.mark.parametrize(
    ("status", "named"),
    [
        (5, "NcclError: NCCL_ERROR_INVALID_USAGE: invalid usage. Set NCCL_DEBUG=INFO to see more"),
        (7, r"ncclInProgress \(7\).*; unset NCCL_COMM_BLOCKING"),
        (8, r"ncclTimeout \(8\)\. Set NCCL_DEBUG=INFO to see more"),
        (3, "internal error"),
    ],
)
def test_connection_that_fails_raises_on_all_ranks(
    stand_in: Any, where: str, status: int, named: str
) -> None:
    # Make all ranks fail: unlike NCCL, the stand-in does not tell the others if one fails.
    stand_in.library.failing = {where: status}
    message = f"NCCL cannot connect {WORLD.size} ranks. Rank 0, on .*, failed with .*{named}"
    with pytest.raises(RuntimeError, match=message):
        NcclTransport(WORLD, stand_in)


@pytest.mark.mpi(2)
def test_nccls_own_message_with_rank_and_host(stand_in: Any) -> None:
    transport = NcclTransport(WORLD, stand_in)
    array = stand_in.to_gpu(np.zeros(2, "f"))
    host = MPI.Get_processor_name()
    stand_in.library.failing = {"allReduce": 1}
    message = f"failed in allReduce on rank {WORLD.rank} of 2, on {host}: NCCL_ERROR_UNHANDLED"
    with pytest.raises(RuntimeError, match=message):
        transport.allreduce(array)
    stand_in.library.asynchronous_error = 6
    with pytest.raises(RuntimeError, match=r"an earlier call on rank \d of 2.*process exited"):
        transport.bcast(array)
    assert "process exited" in str(transport.failure())
    transport.close()
    assert transport.failure() is None


@pytest.mark.mpi(2)
@pytest.mark.parametrize("call", ["allReduce", "groupEnd"])
@pytest.mark.parametrize(
    ("status", "named"),
    [
        (7, r"ncclInProgress \(7\).*; unset NCCL_COMM_BLOCKING"),
        (8, r"ncclTimeout \(8\)"),
        (9, r"error 9"),
    ],
)
def test_errors_that_cupy_cannot_name(stand_in: Any, call: str, status: int, named: str) -> None:
    transport = NcclTransport(WORLD, stand_in)
    array = stand_in.to_gpu(np.zeros(3, "f"))
    stand_in.library.failing = {call: status}
    message = rf"NCCL failed in .* on rank {WORLD.rank} of 2, on \S+: {named}"
    with pytest.raises(RuntimeError, match=message):
        transport.allreduce(array) if call == "allReduce" else transport.allgather(array)


@pytest.mark.mpi(2)
def test_earlier_call_that_is_still_under_way_has_not_failed(stand_in: Any) -> None:
    transport = NcclTransport(WORLD, stand_in)
    stand_in.library.asynchronous_error = 7
    assert transport.failure() is None
    transport.allreduce(stand_in.to_gpu(np.zeros(3, "f")))
    stand_in.library.asynchronous_error = 8
    assert re.search(
        r"an earlier call on rank \d of 2, .*: ncclTimeout \(8\)", transport.failure()
    )
    transport.close()


@pytest.mark.mpi(2)
def test_only_what_has_not_failed_is_destroyed(stand_in: Any) -> None:
    """Abort the rest, since destroying waits for the other ranks."""
    array = stand_in.to_gpu(np.zeros(3, "f"))
    NcclTransport(WORLD, stand_in).close()
    transport = NcclTransport(WORLD, stand_in)
    stand_in.library.asynchronous_error = 6
    transport.close()
    stand_in.library.asynchronous_error = 0
    transport = NcclTransport(WORLD, stand_in)
    stand_in.library.failing = {"allReduce": 1}
    with pytest.raises(RuntimeError, match="NCCL failed in allReduce"):
        transport.allreduce(array)
    transport.close()
    assert stand_in.library.ended == ["destroy", "abort", "abort"]


@pytest.mark.mpi(2)
def test_watch_looks_at_others_while_one_is_destroyed(stand_in: Any) -> None:
    """Keep looking, since destroying may take forever if a rank has died."""
    looks: list[str | None] = []
    one, other = NcclTransport(WORLD, stand_in), NcclTransport(WORLD, stand_in)

    def look() -> None:
        looks.append(one.failure())
        stand_in.library.asynchronous_error = 6
        looks.append(other.failure())

    def before_destroying() -> None:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(30)

    stand_in.library.before_destroying = before_destroying
    one.close()
    other.close()  # or the watch of these ranks would end the job
    first, second = looks
    assert first is None
    assert "process exited" in str(second)


@pytest.mark.parametrize("how", ["error", "killed"])
def test_job_of_which_a_rank_waits_for_nccl_in_vain_ends(how: str) -> None:
    result = run_job(2, [Path(__file__).parent / "wait_for_nccl.py", how])
    assert not result.timed_out
    assert result.returncode != 0
    if how == "error":
        assert "NCCL failed in an earlier call on rank 0 of 2, on " in result.stderr
        assert "NCCL_ERROR_REMOTE_ERROR: remote process exited" in result.stderr
    else:
        assert "chainermn: rank 1 on " in result.stderr
        assert "Ending the whole job" in result.stderr


@pytest.mark.mpi(2, 3)
def test_gpu_that_two_ranks_use(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_devices(WORLD, stand_in)
    stand_in.address, stand_in.visible = "0000:07:00.0", 1
    message = (
        f"rank 1 uses the same one as rank 0, 0000:07:00.0 of .* has {WORLD.size} ranks, "
        "and rank 1 sees 1 GPU"
    )
    with pytest.raises(RuntimeError, match=message):
        check_devices(WORLD, stand_in)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    check_devices(WORLD, stand_in)


@pytest.mark.mpi(1)
def test_numbers_that_nccl_does_not_know(stand_in: Any) -> None:
    with pytest.raises(TypeError, match="cannot sum arrays of complex64"):
        NcclTransport(WORLD, stand_in).combine(stand_in.to_gpu(np.zeros(2, "c8")))
