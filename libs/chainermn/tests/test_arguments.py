"""Errors name arguments that are swapped or of the wrong type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import pytest
from chainer.training import extensions
from mpi4py import MPI

import chainermn
from chainermn.extensions import multi_node_snapshot

pytestmark = pytest.mark.each_mpi


def evaluator() -> extensions.Evaluator:
    return extensions.Evaluator(
        chainer.iterators.SerialIterator([1], 1, repeat=False), chainer.Link()
    )


# What to write, and a call with its arguments swapped.
SWAPPED: dict[str, Callable[[Any], object]] = {
    "create_multi_node_optimizer(actual_optimizer, communicator)": (
        lambda comm: chainermn.create_multi_node_optimizer(comm, chainer.optimizers.SGD())
    ),
    "create_multi_node_evaluator(actual_evaluator, communicator)": (
        lambda comm: chainermn.create_multi_node_evaluator(comm, evaluator())
    ),
    "create_multi_node_checkpointer(name, comm)": (
        lambda comm: chainermn.create_multi_node_checkpointer(comm, "name")
    ),
    "scatter_dataset(dataset, comm)": lambda comm: chainermn.scatter_dataset(comm, [1, 2]),
    "create_multi_node_iterator(actual_iterator, communicator)": (
        lambda comm: chainermn.iterators.create_multi_node_iterator(comm, iter([]))
    ),
    "create_synchronized_iterator(actual_iterator, communicator)": (
        lambda comm: chainermn.iterators.create_synchronized_iterator(comm, iter([]))
    ),
    "create_mnbn_model(link, comm)": (
        lambda comm: chainermn.links.create_mnbn_model(comm, chainer.Link())
    ),
    "multi_node_snapshot(comm, snapshot, replica_sets)": (
        lambda comm: multi_node_snapshot(extensions.snapshot(), comm, [])
    ),
}


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("call", SWAPPED)
def test_swapped_arguments(comm: Any, call: str) -> None:
    with pytest.raises(TypeError) as caught:
        SWAPPED[call](comm)
    name = call.partition("(")[0]
    assert str(caught.value) == f"the arguments of {name} are swapped: write {call}"


# The wrong argument, a call with it, and what the error says.
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "communicator by name": (
        lambda comm: chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), "naive"),
        "create_multi_node_optimizer: expected a communicator, as create_communicator returns, "
        "got 'naive' of type str",
    ),
    "model": (
        lambda comm: chainermn.create_multi_node_optimizer([1, 2], comm),
        "create_multi_node_optimizer: expected an optimizer, got [1, 2] of type list",
    ),
    "class": (
        lambda comm: chainermn.create_multi_node_optimizer(chainer.optimizers.SGD, comm),
        "create_multi_node_optimizer: expected an optimizer, "
        "got the class SGD, not one of its objects",
    ),
    "optimizer that is wrapped already": (
        lambda comm: chainermn.create_multi_node_optimizer(
            chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm), comm
        ),
        "create_multi_node_optimizer: this optimizer averages gradients already; wrap it once",
    ),
    "scattering to a name": (
        lambda comm: chainermn.scatter_dataset([1, 2], "naive"),
        "scatter_dataset: expected a communicator, as create_communicator returns, "
        "got 'naive' of type str",
    ),
    "no link": (
        lambda comm: chainermn.links.create_mnbn_model(None, comm),
        "create_mnbn_model: expected a model, which is a chainer.Link, got None of type NoneType",
    ),
    "number instead of a communicator's name": (
        lambda comm: chainermn.create_communicator(2),
        "create_communicator: expected the name of an algorithm, such as 'flat', got 2; "
        "a communicator of mpi4py is passed as mpi_comm=...",
    ),
    "two names of communicators": (
        lambda comm: chainermn.create_communicator("naive", "flat"),
        "create_communicator: expected a communicator of mpi4py, got 'flat' of type str",
    ),
    "no evaluator": (
        lambda comm: chainermn.create_multi_node_evaluator(None, comm),
        "create_multi_node_evaluator: expected an evaluator, with a method evaluate, "
        "got None of type NoneType",
    ),
    "name that is none": (
        lambda comm: chainermn.create_multi_node_checkpointer(5, comm),
        "the name must be that of a file, got 5",
    ),
    "no snapshot": (
        lambda comm: multi_node_snapshot(comm, [], []),
        "multi_node_snapshot: expected a snapshot, as chainer.training.extensions.snapshot "
        "returns, got [] of type list",
    ),
}


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_type(what: str) -> None:
    call, message = WRONG[what]
    comm = chainermn.create_communicator("naive")
    with pytest.raises((TypeError, ValueError)) as caught:
        call(comm)
    assert str(caught.value) == message


@pytest.mark.mpi(2)
def test_communicator_of_mpi4py_is_none_of_chainermn() -> None:
    with pytest.raises(TypeError, match="expected a communicator, as create_communicator returns"):
        chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), MPI.COMM_WORLD)


@pytest.mark.mpi(2)
def test_what_is_no_snapshot_on_one_rank_raises_on_all(comm: Any) -> None:
    snapshot = extensions.snapshot() if comm.rank == 0 else None
    with pytest.raises(TypeError, match="multi_node_snapshot: expected a snapshot"):
        multi_node_snapshot(comm, snapshot, [])
