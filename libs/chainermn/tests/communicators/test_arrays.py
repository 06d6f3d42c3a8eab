"""Collectives on arrays, against NumPy in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

pytestmark = pytest.mark.each_mpi


def array_of(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return the array of ``rank``: small integers, whose sums are exact in every dtype."""
    drawn = np.random.default_rng([rank, *shape]).integers(0, 9, shape)
    return np.asarray(drawn, dtype)


def same(actual: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
        return
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.mpi(1, 3)
def test_tuples(comm: MpiCommunicatorBase) -> None:
    everywhere = tuple(
        (array_of(rank, (2,), "float32"), array_of(rank, (), "int64")) for rank in range(comm.size)
    )
    own = everywhere[comm.rank]
    same(comm.bcast(own), everywhere[0])
    same(comm.allgather(own), everywhere)
    same(comm.scatter(list(everywhere)), everywhere[comm.rank])
    same(
        comm.allreduce(own), tuple(np.sum(part, axis=0) for part in zip(*everywhere, strict=True))
    )
    same(comm.bcast(()), ())


@pytest.mark.mpi(1, 3)
def test_a_list_of_arrays_arrives_as_a_tuple(comm: MpiCommunicatorBase) -> None:
    everywhere = tuple(
        (array_of(rank, (2,), "float32"), array_of(rank, (), "int64")) for rank in range(comm.size)
    )
    own = list(everywhere[comm.rank])
    same(comm.bcast(own), everywhere[0])
    gathered = comm.gather(own)
    if comm.rank == 0:
        same(gathered, everywhere)
    same(comm.allgather(own), everywhere)
    same(comm.scatter([list(entry) for entry in everywhere]), everywhere[comm.rank])
    same(
        comm.allreduce(own), tuple(np.sum(part, axis=0) for part in zip(*everywhere, strict=True))
    )
    same(comm.alltoall([own[0]] * comm.size), tuple(first for first, _ in everywhere))
    if comm.size > 1 and comm.rank == 1:
        comm.send(own, 0)
    elif comm.size > 1 and comm.rank == 0:
        same(comm.recv(1), everywhere[1])


@pytest.mark.mpi(2)
def test_foreign_byte_order(comm: MpiCommunicatorBase) -> None:
    foreign = np.arange(3, dtype="f4").astype(">f4")
    same(comm.allreduce(foreign), np.arange(3, dtype="f4") * 2)
    np.testing.assert_array_equal(comm.bcast(foreign), [0, 1, 2])


@pytest.mark.mpi(2, 4)
def test_sums_of_float16_are_rounded_once(comm: MpiCommunicatorBase) -> None:
    # In float16 alone, 2048 + 1 = 2048.
    own = np.array([2048 if comm.rank == 0 else 1] * 5, "float16")
    same(comm.allreduce(own), np.float64([2048 + comm.size - 1] * 5).astype("float16"))


@pytest.mark.mpi(2)
def test_results_beyond_the_range_of_their_dtype(comm: MpiCommunicatorBase) -> None:
    same(comm.allreduce(np.array([100], "int8")), np.array([-56], "int8"))
    same(comm.allreduce(np.array([2**40], "int64"), "prod"), np.array([0]))
    half = np.array([40000], "float16")
    same(comm.allreduce(half), np.array([np.inf], "float16"))
    same(comm.allreduce(half, "mean"), half)
    same(comm.allreduce(half.astype("float32")), np.array([80000], "float32"))


def masked() -> np.ma.MaskedArray:
    return np.ma.masked_array(np.ones((3, 1)), [[False], [True], [False]])


BAD_ALLREDUCE = {
    "a masked array": (masked(), TypeError, r"rank 0: .* mask, .*array\.filled\(value\).*_obj"),
    "a tuple with a masked array": ((masked(),), TypeError, "rank 0: .* without a mask"),
    "no mask in a masked array": (np.ma.masked_array(np.ones((3, 1))), TypeError, "a mask"),
    "another shape": (np.zeros(3), ValueError, r"float64\[3\].*rank 1.*float64\[3, 1\]"),
    "another dtype": (np.zeros((3, 1), "f"), ValueError, "float32"),
    "a tuple": ((np.zeros((3, 1)),), ValueError, "a tuple"),
    "a list": ([np.zeros((3, 1))], ValueError, "a tuple"),
    "numbers": ([1.0], TypeError, "rank 0: expected an array, or .*, got .*list with .*float"),
    "objects": (np.array([None]), TypeError, "rank 0: expected an array of numbers"),
    "None": (None, TypeError, "rank 0: expected an array"),
    "a number": (5, TypeError, r"got .*int.*; turn .* with np\.array\(x\), .*allreduce_obj"),
}


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("bad", BAD_ALLREDUCE)
def test_bad_input_of_one_rank_raises_on_all(comm: MpiCommunicatorBase, bad: str) -> None:
    value, error, message = BAD_ALLREDUCE[bad]
    good = np.zeros((3, 1))
    with pytest.raises(error, match=message):
        comm.allreduce(value if comm.rank == 0 else good)
    if bad != "another shape":
        for method in (comm.gather, comm.allgather):
            with pytest.raises(error):
                method(value if comm.rank == 0 else good)
    same(comm.allreduce(good), good)  # nothing is left pending


@pytest.mark.mpi(1, 2, 3)
def test_bad_input_of_root(comm: MpiCommunicatorBase) -> None:
    def at_root(value: Any) -> Any:
        return value if comm.rank == 0 else None

    with pytest.raises(TypeError, match="bcast: rank 0: expected an array"):
        comm.bcast(at_root("text"))
    with pytest.raises(TypeError, match="scatter: rank 0: expected a sequence with one entry"):
        comm.scatter(at_root(np.array(1.0)))
    with pytest.raises(TypeError, match="bcast: rank 0: expected an array without a mask"):
        comm.bcast(at_root([np.zeros(2), masked()]))
    for parts in (np.ma.masked_all(comm.size), np.ma.masked_all((comm.size, 2))):
        with pytest.raises(TypeError, match="scatter: rank 0: expected an array without a mask"):
            comm.scatter(at_root(parts))
    with pytest.raises(ValueError, match=f"expected {comm.size} entries, one per rank, got 7"):
        comm.scatter(at_root([np.zeros(2)] * 7))
    with pytest.raises(TypeError, match="scatter: rank 0: expected an array"):
        comm.scatter(at_root([3] * comm.size))
    with pytest.raises(ValueError, match="root"):
        comm.bcast(np.zeros(1), root=comm.size)


@pytest.mark.mpi(2, 3)
def test_bad_alltoall(comm: MpiCommunicatorBase) -> None:
    good = [np.zeros(2)] * comm.size
    with pytest.raises(ValueError, match=r"rank 1: expected \d entries"):
        comm.alltoall(good[1:] if comm.rank == 1 else good)
    with pytest.raises(TypeError, match="rank 1: expected an array"):
        comm.alltoall([1] * comm.size if comm.rank == 1 else good)
    with pytest.raises(TypeError, match="rank 1: expected an array without a mask"):
        comm.alltoall([masked()] * comm.size if comm.rank == 1 else good)
    with pytest.raises(ValueError, match="same dtypes"):
        comm.alltoall([np.zeros(2, "f")] * comm.size if comm.rank == 1 else good)


@pytest.mark.mpi(2)
def test_bad_send_raises_on_both_sides(comm: MpiCommunicatorBase) -> None:
    for bad, message in (([1, 2], "expected an array"), ([masked()], "an array without a mask")):
        if comm.rank == 0:
            with pytest.raises(TypeError, match=f"send to rank 1: rank 0: .*{message}"):
                comm.send(bad, 1)
        else:
            with pytest.raises(TypeError, match=f"recv on rank 1: rank 0: .*{message}"):
                comm.recv(0)


@pytest.mark.mpi(2)
def test_ops_that_make_no_sense(comm: MpiCommunicatorBase) -> None:
    with pytest.raises(TypeError, match="cast to a float dtype"):
        comm.allreduce(np.zeros(3, int), op="mean")
    with pytest.raises(TypeError, match="bool"):
        comm.allreduce(np.zeros(3, bool))
    with pytest.raises(ValueError, match="op must be"):
        comm.allreduce(np.zeros(3), op="median")
    with pytest.raises(ValueError, match="disagree"):
        comm.allreduce(np.zeros(3), op="sum" if comm.rank == 0 else "max")


@pytest.mark.mpi(2, 3)
def test_roots_that_differ(comm: MpiCommunicatorBase) -> None:
    for call in (comm.bcast, comm.gather):
        with pytest.raises(ValueError, match="disagree"):
            call(np.zeros(2), root=min(comm.rank, 1))
        with pytest.raises(ValueError, match="rank 1: root must be a rank"):
            call(np.zeros(2), root=7 if comm.rank == 1 else 0)
    with pytest.raises(ValueError, match="disagree"):
        comm.scatter([np.zeros(2)] * comm.size, root=min(comm.rank, 1))
    for call in (comm.bcast_obj, comm.gather_obj):
        with pytest.raises(ValueError, match=r"rank 0: root must be a rank.*got 'first'"):
            call(1, root="first" if comm.rank == 0 else 0)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_message_under_way_is_not_taken_for_part_of_a_collective(
    comm: MpiCommunicatorBase, dtype: str
) -> None:
    x, y = np.full(3, 7, dtype), np.arange(3, dtype=dtype)
    if comm.rank == 1:
        comm.send(x, 0)
    gathered = comm.gather(y + comm.rank)
    total = comm.allreduce(y)
    if comm.rank == 0:
        same(gathered, (y, y + 1))
        same(comm.recv(1), x)
    same(total, y * 2)


@pytest.mark.mpi(2)
def test_complex_numbers(comm: MpiCommunicatorBase) -> None:
    same(comm.allreduce(np.array([1j])), np.array([2j]))
    with pytest.raises(TypeError, match="no order"):
        comm.allreduce(np.array([1j]), op="max")


@pytest.mark.mpi(2)
def test_alltoall_of_tuples(comm: MpiCommunicatorBase) -> None:
    with pytest.raises(
        TypeError, match="rank 0: expected an array for each rank, got a tuple or list"
    ):
        comm.alltoall([(np.zeros(2),)] * comm.size)
