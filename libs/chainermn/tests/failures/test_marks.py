"""The marks around the calls of communicators, and the counts that ranks compare."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.failures import activity
from chainermn.gradients.exchange import GradientExchange
from chainermn.gradients.overlap.exchange import OverlappedExchange

pytestmark = pytest.mark.each_mpi


@pytest.fixture
def comm() -> Any:
    return chainermn.create_communicator("naive").split(0, MPI.COMM_WORLD.rank)


def stream_of(comm: Any, source: int, dest: int) -> str:
    return comm.group.stream_of_messages(source, dest)


@pytest.mark.mpi(3)
def test_messages_from_any_rank_are_counted_as_those_of_their_sender(comm: Any) -> None:
    if comm.rank:
        for number in range(comm.rank):
            comm.send_obj((comm.rank, number), 0)
    else:
        received = [comm.recv_obj(MPI.ANY_SOURCE) for _ in range(3)]
        assert sorted(received) == [(1, 0), (2, 0), (2, 1)]
    counts = activity.counts()
    for sender in (1, 2):
        if comm.rank in (0, sender):  # both ends count alike
            assert counts[stream_of(comm, sender, 0)] == sender
    comm.allreduce(np.ones(1))


@pytest.mark.mpi(2)
def test_message_to_a_rank_that_is_not_there(comm: Any) -> None:
    before = activity.counts()
    with pytest.raises(MPI.Exception):
        comm.send_obj("nobody", 2)
    assert activity.counts() == before
    assert activity.waits() == []
    comm.allreduce(np.ones(1))


LOCAL = {"config_scope", "finalize", "get_config", "set_config"}
# These call another method, which is marked.
INDIRECT = {"agree_to_add_up", "allreduce_grad", "broadcast_data"}
POINT_TO_POINT = {"recv", "recv_obj", "send", "send_obj"}


def is_marked(method: Any) -> bool:
    return bool(method.__code__.co_filename == activity.__file__)


def test_every_public_collective_is_marked() -> None:
    public = {
        name: method
        for name, method in inspect.getmembers(MpiCommunicatorBase, inspect.isfunction)
        if not name.startswith("_") and hasattr(CommunicatorBase, name)
    }
    assert public.keys() >= LOCAL | INDIRECT | POINT_TO_POINT
    unmarked = {name for name, method in public.items() if not is_marked(method)}
    assert unmarked == LOCAL | INDIRECT | POINT_TO_POINT
    for method in (GradientExchange.mean, OverlappedExchange.mean):
        assert is_marked(method)
