"""Memory shared by several streams: none may reuse it while another still reads it.

Every test with the stand-in for a GPU fails if such a race is found: see `stand_in_memory`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import registered
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
STEPS = 4


def make(name: str) -> Any:
    return registered()[name](WORLD, topology=Topology((0,) * WORLD.size, WORLD.rank))


class Model(chainer.Link):
    def __init__(self, place: Any) -> None:
        super().__init__()
        with self.init_scope():
            for name in "abcd":
                setattr(self, name, chainer.Parameter(place(np.zeros((3, 3), np.float32))))


def parameters_after(
    stand_in: Any, name: str, place: Any, gate: threading.Semaphore | None = None
) -> dict[str, np.ndarray]:
    """Return the parameters after some steps with double buffering.

    Two gradients are one array, one is not contiguous, and one exists only on rank 0. The
    exchange begins once ``gate`` opens, after the previous gradients have been dropped.
    """
    comm, model = make(name), Model(place)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1.0), comm, double_buffering=True, zero_fill=True
    ).setup(model)
    for step in range(STEPS):
        model.cleargrads()
        if gate is not None:
            gate.release()
        values = np.arange(9, dtype=np.float32).reshape(3, 3) + step + comm.rank
        model.a.grad = model.b.grad = place(values)
        model.c.grad = place(values).T
        if comm.rank == 0:
            model.d.grad = place(values)
        optimizer.update()
    if gate is not None:
        gate.release()
    optimizer.wait()
    found = {key: np.array(parameter.array) for key, parameter in model.namedparams()}
    comm.finalize()
    return found


@pytest.mark.mpi(1, 2)
@pytest.mark.parametrize("name", ["naive", "pure_nccl"])
@pytest.mark.parametrize("is_late", [False, True])
def test_double_buffering(
    stand_in: Any, name: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parameters_after(stand_in, "naive", np.array)
    gate, on = threading.Semaphore(0), stand_in.on

    @contextlib.contextmanager
    def on_when_let(stream: Any) -> Iterator[None]:
        gate.acquire()
        with on(stream):
            yield

    if is_late:
        monkeypatch.setattr(stand_in, "on", on_when_let)
    found = parameters_after(stand_in, name, stand_in.to_gpu, gate if is_late else None)
    assert len(stand_in.streams) == 1
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6, err_msg=key)
        assert value.any()


@pytest.mark.mpi(2)
def test_training_thread_never_waits_with_double_buffering(stand_in: Any) -> None:
    parameters_after(stand_in, "pure_nccl", stand_in.to_gpu)
    assert stand_in.waits == 0


def test_races_are_found(stand_in: Any) -> None:
    stream, races = stand_in.new_stream(), stand_in.memory.races
    like = np.ones(4, "f")

    def used_on_stream() -> Any:
        array = stand_in.to_gpu(like)
        with stand_in.on(stream):
            array += 1
        return array

    # The default stream may reuse it immediately.
    array = used_on_stream()
    del array
    assert len(races) == 1
    assert "the default stream may reuse memory" in races.pop()
    stand_in.to_gpu(like)
    assert len(races) == 1
    assert "the default stream reuses memory" in races.pop()
    # Waiting in time prevents the race.
    array = used_on_stream()
    with stand_in.on(stream):
        event = stand_in.record()
    stand_in.wait_for(event)
    del array
    # The host may wait instead.
    array = used_on_stream()
    with stand_in.on(stream):
        stand_in.record().Wait()
    del array
    assert not races
    # The other way around, only reuse is wrong.
    for waits in (True, False):
        with stand_in.on(stream):
            array = stand_in.to_gpu(like)
        array += 1
        computed = stand_in.record()
        del array
        assert not races
        with stand_in.on(stream):
            if waits:
                stand_in.wait_for(computed)
            stand_in.to_gpu(like)
    assert len(races) == 1
    assert "a stream of its own reuses memory that the default stream may" in races.pop()
