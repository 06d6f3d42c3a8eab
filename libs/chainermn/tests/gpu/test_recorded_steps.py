"""Steps of several ranks as CUDA graphs, recorded and launched by a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest

import chainermn
from chainermn.functions import multi_node_batch_normalization

pytestmark = pytest.mark.gpu

GIVE_UP, EAGER, RECORD, CHECK, REPLAY = range(5)


class Graphs:
    """Records the gradients of the second step, and launches them in all later ones."""

    def __init__(self) -> None:
        import cupy

        self.agreed: list[int] = []
        self._cupy, self._graph = cupy, None
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._pool = cupy.cuda.MemoryPool()

    def update(self, steps: Any, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
        assert steps.why_not() is None
        wish = min(EAGER + len(self.agreed), REPLAY)
        self.agreed.append(steps.agree(wish))
        if wish == EAGER:
            steps.eager(lossfun, args, kwds)
            return
        cuda = self._cupy.cuda
        cuda.Device().synchronize()
        if wish == RECORD:
            with self._stream, cuda.using_allocator(self._pool.malloc):
                steps.gradients(lossfun, args, kwds, None)
                self._stream.synchronize()
                self._stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
                steps.gradients(lossfun, args, kwds, None)
                self._graph = self._stream.end_capture()
        assert self._graph is not None
        with steps.launching():
            self._graph.launch(self._stream)
        self._stream.synchronize()
        steps.optimizer.update(None)


class Model(chainer.Chain):
    def __init__(self, place: Any, normalize: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(place(np.full(3, 0.5, np.float32)))
            self.gamma = chainer.Parameter(place(np.ones(3, np.float32)))
            self.beta = chainer.Parameter(place(np.zeros(3, np.float32)))
            self.unused = chainer.Parameter(place(np.ones(5, np.float32)))
        self.normalize = normalize

    def forward(self, x: Any) -> Any:
        h = F.broadcast_to(self.w, x.shape) * x
        if self.normalize is not None:
            h = self.normalize(h, self.gamma, self.beta)
        return F.sum(h * h * h) * (1 / len(x))


@pytest.mark.mpi(1, 2, timeout=120)
@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize("way", ["plain", "overlap", "normalize"])
def test_graphs_take_the_steps_of_one_process(a_gpu: Any, way: str, mpi_ranks: int) -> None:
    comm = chainermn.create_communicator("pure_nccl")
    normalizes = way == "normalize"

    def batch(rank: int, step: int) -> np.ndarray:
        return np.random.default_rng([rank, step]).normal(size=(4, 3)).astype(np.float32)

    def normalize(h: Any, gamma: Any, beta: Any) -> Any:
        return multi_node_batch_normalization(h, gamma, beta, comm)

    actual = chainer.optimizers.SGD(0.01)
    graphs = actual.cuda_graphs = Graphs()  # type: ignore[attr-defined]
    model = Model(a_gpu.to_gpu, normalize if normalizes else None)
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, overlap=way == "overlap")
    optimizer.setup(model)
    x = a_gpu.to_gpu(batch(comm.rank, 0))
    optimizer.update(model, x)  # makes the replicas equal
    for step in range(1, 7):
        x[...] = a_gpu.to_gpu(batch(comm.rank, step))
        optimizer.update(model, x)
    assert graphs.agreed == [EAGER, RECORD, CHECK, REPLAY, REPLAY, REPLAY]

    alone = Model(np.asarray, F.batch_normalization if normalizes else None)
    in_one_process = chainer.optimizers.SGD(0.01).setup(alone)
    for step in range(1, 7):
        whole = np.concatenate([batch(rank, step) for rank in range(mpi_ranks)])
        in_one_process.update(alone, whole)
    for name, parameter in alone.namedparams():
        found = a_gpu.to_host(dict(model.namedparams())[name].array)
        np.testing.assert_allclose(found, parameter.array, rtol=1e-4, atol=1e-5, err_msg=name)
    comm.finalize()
