"""A small job for tests of optimizers, and how it is resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.training import Trainer, extensions

import chainermn
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions import create_multi_node_checkpointer, multi_node_snapshot

N_EXAMPLES, BATCH = 60, 2

#: A function that takes a folder and a number of iterations, and returns a trainer.
Make = Callable[[Path, int], Trainer]


class Network(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        np.random.seed(0)
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.a = L.Linear(3, 5)
            self.b = L.Linear(5, 2)

    def forward(self, x: Any, t: Any) -> Any:
        loss = F.mean_squared_error(self.b(F.tanh(self.a(x))), t)
        chainer.report({"loss": loss}, self)
        return loss


def examples() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(N_EXAMPLES, 3))
    return x, np.sin(x[:, :2])


def make_trainer(
    optimizer: Any, out: Path, iterations: int, n_examples: int = N_EXAMPLES
) -> Trainer:
    data = chainer.datasets.TupleDataset(*examples())[:n_examples]
    part = chainermn.scatter_dataset(data, optimizer.communicator, force_equal_length=False)
    iterator = chainer.iterators.SerialIterator(part, BATCH, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return Trainer(updater, (iterations, "iteration"), out=str(out))


def values(link: chainer.Link) -> dict[str, np.ndarray]:
    parameters = link.namedparams(include_uninit=False)
    return {name: np.array(parameter.array) for name, parameter in parameters}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert getattr(value, "dtype", None) == getattr(other[name], "dtype", None), name
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def assert_close(one: chainer.Link, other: chainer.Link, rtol: float = 1e-11) -> None:
    actual, expected = values(one), values(other)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_allclose(value, expected[name], rtol, atol=rtol / 100, err_msg=name)


def assert_replicas(comm: CommunicatorBase, link: chainer.Link, *, equal: bool = True) -> None:
    for name, value in sorted(values(link).items()):
        n_different = len(set(comm.allgather_obj(value.tobytes())))
        assert (n_different == 1) is equal or comm.size == 1, name


def extend(trainer: Any, comm: CommunicatorBase, kind: str, every: int) -> None:
    """Make a trainer write snapshots of a kind, and resume from the newest one."""
    trigger = (every, "iteration")
    if kind == "checkpointer":
        checkpointer = create_multi_node_checkpointer("checkpoint", comm)
        checkpointer.finalize = lambda: None  # the real one would delete the checkpoints
        trainer.extend(checkpointer, trigger=trigger)
        checkpointer.maybe_load(trainer)
        return
    snapshot = extensions.snapshot(autoload=True)
    if kind == "object":
        optimizer = trainer.updater.get_optimizer("main")
        snapshot = extensions.snapshot_object(optimizer, "optimizer", autoload=True)
    trainer.extend(multi_node_snapshot(comm, snapshot, []), trigger=trigger)


def resume(make: Make, kind: str, comm: CommunicatorBase, out: Path) -> tuple[Any, Any]:
    """Return the optimizers of an unbroken run and of one interrupted after 7 iterations."""

    def run(iterations: int, out: Path) -> Any:
        trainer = make(out, iterations)
        extend(trainer, comm, kind, 7)
        trainer.run()
        comm.allgather_obj(None)
        return trainer.updater.get_optimizer("main")

    unbroken = run(20, out / "unbroken")
    run(7, out)
    return unbroken, run(20, out)


def resume_from_rank_0(
    make: Make, comm: CommunicatorBase, out: Path, iterations: int, is_lost: bool
) -> Any:
    """Resume on two ranks from a plain snapshot of rank 0; return the optimizer.

    Rank 0 must warn if what rank 1 had is lost, and only then.
    """
    trainer = make(out, iterations)
    trainer.run()
    file = str(out / "snapshot")
    if comm.rank == 0:
        chainer.serializers.save_npz(file, trainer)
    comm.allgather_obj(None)
    resumed = make(out, 20)
    chainer.serializers.load_npz(file, resumed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.run()
    reason = "when the snapshot was written is lost: the snapshot lacks what rank 1 had"
    expected = [True] * (comm.rank == 0 and is_lost)
    assert [reason in str(each.message) for each in caught] == expected
    return resumed.updater.get_optimizer("main")
