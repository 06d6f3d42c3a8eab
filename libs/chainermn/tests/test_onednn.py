"""Models computed by oneDNN: the ranks exchange what they would exchange with NumPy."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.backends import intel64

import chainermn
from chainer_fast.onednn import library
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.profiling.layers import layer_spans

pytestmark = [
    pytest.mark.mpi(1, 2, 3),
    pytest.mark.skipif(bool(library.why_not()), reason=library.why_not()),
]


def left_by_onednn(x: chainer.Variable) -> chainer.Variable:
    """Return the same numbers as a convolution leaves them, in oneDNN's layout."""
    unit = np.eye(x.shape[1], dtype=np.float32)[:, :, None, None]
    same = F.convolution_2d(x, unit)
    assert isinstance(same.array, intel64.mdarray)
    return same


def numbers(*shape: int) -> chainer.Variable:
    return chainer.Variable(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_it_computes_by_default() -> None:
    assert chainer.config.use_ideep == "auto"


def test_collective_calls(comm: CommunicatorBase) -> None:
    n, ranks = comm.size, range(comm.size)
    array = numbers(n, 16, 2, 2).array

    def mine() -> intel64.mdarray:
        return left_by_onednn(chainer.Variable(array)).array + comm.rank

    total = n * array + sum(ranks)
    assert comm.allreduce(mine()).tolist() == total.tolist()
    assert [a.tolist() for a in comm.allgather(mine())] == [(array + r).tolist() for r in ranks]
    assert comm.bcast(mine(), root=n - 1).tolist() == (array + n - 1).tolist()
    assert comm.scatter(mine()).tolist() == array[comm.rank].tolist()
    received = comm.alltoall([mine()] * n)
    assert [a.tolist() for a in received] == [(array + r).tolist() for r in ranks]
    objects = comm.allgather_obj(mine())
    assert [np.asarray(a).tolist() for a in objects] == [(array + r).tolist() for r in ranks]


def test_spans_of_layers_leave_results_in_its_layout() -> None:
    images = left_by_onednn(numbers(2, 16, 2, 2))
    with layer_spans():
        F.relu(images)
    assert images.array.is_in_blocks


def test_functions_and_their_gradients(comm: CommunicatorBase) -> None:
    x = numbers(2, 16, 2, 2)
    gathered = chainermn.functions.allgather(comm, left_by_onednn(x))
    F.sum(sum(gathered) * x.array).backward()
    np.testing.assert_array_equal(np.asarray(x.grad), comm.size * x.array)


def model(dtype: str) -> chainer.Sequential:
    with chainer.using_config("dtype", np.dtype(dtype)):
        np.random.seed(0)
        layers = (
            L.Convolution2D(3, 16, 3, pad=1),
            F.relu,
            lambda h: F.max_pooling_2d(h, 2),
            L.Convolution2D(16, 32, 3),
            F.relu,
            L.Linear(32 * 4, 5),
        )
        return chainer.Sequential(*layers)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device", ["@numpy", "@intel64"])
def test_gradients_are_those_of_one_process_in_float64(device: str, overlap: bool) -> None:
    comm = chainermn.create_communicator("naive")
    random = np.random.default_rng(0)
    x = random.normal(size=(comm.size, 4, 3, 8, 8))
    t = random.integers(0, 5, (comm.size, 4)).astype(np.int32)
    with chainer.using_config("use_ideep", "never"):
        expected = model("float64")
        expected.cleargrads()
        y = expected(x.reshape(-1, *x.shape[2:]))
        F.softmax_cross_entropy(y, t.reshape(-1)).backward()
    found = model("float32")
    found.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.0), comm, overlap=overlap
    ).setup(found)
    ours = x[comm.rank].astype(np.float32)
    for _ in range(2):  # the first step broadcasts
        optimizer.update(lambda: F.softmax_cross_entropy(found(ours), t[comm.rank]))
    for p, q in zip(found.params(), expected.params(), strict=True):
        np.testing.assert_allclose(np.asarray(p.grad), q.grad, rtol=1e-4, atol=1e-6)
