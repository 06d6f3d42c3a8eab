"""Collectives on objects."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase

pytestmark = pytest.mark.each_mpi


def obj_of(rank: int) -> dict[str, Any]:
    """Return an object that fits in its message's header on even ranks, but not on odd ones."""
    return {"rank": rank, "array": np.arange((1 + rank % 2 * 100_000) * 2.0), "text": "é" * rank}


def same(actual: Any, expected: dict[str, Any]) -> None:
    assert actual["rank"] == expected["rank"]
    assert actual["text"] == expected["text"]
    np.testing.assert_array_equal(actual["array"], expected["array"])
    actual["array"][...] = 0  # received arrays are writable


@pytest.mark.mpi(1, 2, 3, 4)
def test_bcast_obj(comm: MpiCommunicatorBase) -> None:
    for root in range(comm.size):
        same(comm.bcast_obj(obj_of(root) if comm.rank == root else None, root=root), obj_of(root))


@pytest.mark.mpi(2)
def test_masks_are_kept(comm: MpiCommunicatorBase) -> None:
    array = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
    for received in (comm.bcast_obj(array), *comm.allgather_obj(array)):
        assert received.mask.tolist() == [False, True, False]
        assert received.compressed().tolist() == [1, 3]
    assert comm.allreduce_obj(array).tolist() == [2, None, 6]


@pytest.mark.mpi(1, 2, 3, 4)
def test_gather_obj(comm: MpiCommunicatorBase) -> None:
    for root in range(comm.size):
        gathered = comm.gather_obj(obj_of(comm.rank), root)
        if comm.rank != root:
            assert gathered is None
            continue
        assert gathered is not None
        for rank in range(comm.size):
            same(gathered[rank], obj_of(rank))


@pytest.mark.mpi(1, 2, 3, 4)
def test_allgather_obj(comm: MpiCommunicatorBase) -> None:
    gathered = comm.allgather_obj(obj_of(comm.rank))
    assert len(gathered) == comm.size
    for rank in range(comm.size):
        same(gathered[rank], obj_of(rank))


@pytest.mark.mpi(1, 2, 3, 4)
def test_scatter_obj(comm: MpiCommunicatorBase) -> None:
    for root in range(comm.size):
        objs = [obj_of(rank) for rank in range(comm.size)] if comm.rank == root else None
        same(comm.scatter_obj(objs, root), obj_of(comm.rank))


@pytest.mark.mpi(1, 2, 3, 4)
def test_allreduce_obj(comm: MpiCommunicatorBase) -> None:
    assert comm.allreduce_obj(comm.rank + 1) == sum(range(1, comm.size + 1))
    assert comm.allreduce_obj([comm.rank]) == list(range(comm.size))


@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("sender", [0, 1])
def test_send_obj_and_recv_obj(comm: MpiCommunicatorBase, sender: int) -> None:
    receiver = 1 - sender
    if comm.rank == sender:
        comm.send_obj(obj_of(sender), receiver, tag=5)
        comm.send_obj("second", receiver)
    elif comm.rank == receiver:
        same(comm.recv_obj(sender, tag=5), obj_of(sender))
        assert comm.recv_obj(sender) == "second"


@pytest.mark.mpi(1, 2, 3)
def test_object_that_cannot_be_pickled_raises_on_all_ranks(comm: MpiCommunicatorBase) -> None:
    lock = threading.Lock()
    last = comm.size - 1

    def at_last(value: Any) -> Any:
        return value if comm.rank == last else None

    match = f"rank {last}: cannot pickle an object of .*lock"
    for call in (comm.gather_obj, comm.allgather_obj, comm.allreduce_obj):
        with pytest.raises(TypeError, match=match):
            call(at_last(lock))
    with pytest.raises(TypeError, match=match):
        comm.bcast_obj(at_last(lock), root=last)
    with pytest.raises(TypeError, match=match):
        comm.scatter_obj(at_last([lock] * comm.size), root=last)
    with pytest.raises(ValueError, match=r"scatter_obj: .* entries, one per rank, got 9"):
        comm.scatter_obj(at_last([1] * 9), root=last)
    if comm.size > 1 and comm.rank == 0:
        with pytest.raises(TypeError, match="send_obj to rank 1: rank 0: cannot pickle"):
            comm.send_obj(lock, 1)
    elif comm.rank == 1:
        with pytest.raises(TypeError, match="recv_obj on rank 1: rank 0: cannot pickle"):
            comm.recv_obj(0)
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))  # nothing is left pending
