"""Steps as graphs: the same as eager steps, bit for bit, on a stand-in for a GPU."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda
from libs.chainer_fast.tests.stand_in_kernels import Kernel
from libs.chainer_fast.tests.stand_in_tape import RANDOM, XP, Gpu, GpuArray, Tape, TapeKernel, get_array_module, to_gpu

from chainer_fast.repairs import graphs, launches, waits


@pytest.fixture(autouse=True)
def gpu(monkeypatch, compiled):
    made = {}
    monkeypatch.setattr(cuda, "elementwise", lambda *texts: made.setdefault(texts, TapeKernel(*texts)))
    monkeypatch.setattr(cuda, "ndarray", GpuArray)
    monkeypatch.setattr(cuda, "cupy", XP)
    monkeypatch.setattr(cuda.GpuDevice, "from_array", staticmethod(device_of))
    monkeypatch.setattr(cuda, "get_array_module", get_array_module)
    monkeypatch.setattr(chainer.backend, "get_array_module", get_array_module)
    monkeypatch.setattr(Kernel, "launches", [])
    monkeypatch.setattr(Kernel, "compiled", staticmethod(compiled), raising=False)
    for name in ("sgd.SGDRule", "momentum_sgd.MomentumSGDRule", "adam.AdamRule"):
        module, rule = name.split(".")
        monkeypatch.setattr(getattr(getattr(chainer.optimizers, module), rule), "_kernel", None)
    for owner, names in {
        chainer.optimizer.GradientMethod: ["update", "reallocate_cleared_grads"],
        chainer.optimizer.Optimizer: ["check_nan_in_grads", "call_hook"],
    }.items():
        for name in names:
            method = getattr(owner, name)
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            monkeypatch.setattr(owner, name, method)
    launches.update_parameters_at_once(chainer.optimizer)
    waits.look_at_all_gradients_at_once(chainer.optimizer)
    graphs.use_graphs_if_asked(chainer.optimizer)
    with chainer.using_config("use_ideep", "never"):
        yield
    assert Tape.recording is None


def device_of(array):
    return Gpu() if isinstance(array, GpuArray) else None


class Model(chainer.Chain):
    """A perceptron that reports its loss, and keeps its prediction."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)

        def weights(*shape):
            return chainer.Parameter(to_gpu(random.normal(size=shape).astype("f")))

        with self.init_scope():
            self.w1, self.b1, self.w2 = weights(5, 3), weights(5), weights(2, 5)

    def forward(self, x, t):
        self.y = F.linear(F.tanh(F.linear(x, self.w1, self.b1)), self.w2)
        loss = F.sum(F.square(self.y - t)) / t.shape[0]
        chainer.report({"loss": loss}, self)
        return loss


def batches(n, size=4):
    random = np.random.default_rng(1)
    return [
        tuple(to_gpu(random.normal(size=(size, k)).astype("f")) for k in (3, 2)) for _ in range(n)
    ]


def train(optimizer, data, *, graphs, prepare=None, model=None, between=lambda k, o: None):
    """Take a step with each batch; return parameters, what was reported, and the optimizer."""
    model = model or Model()
    optimizer.setup(model)
    if prepare is not None:
        prepare(optimizer)
    if graphs:
        optimizer.use_cuda_graphs()
    reporter = chainer.Reporter()
    reporter.add_observer("main", model)
    found = []
    for k, batch in enumerate(data):
        between(k, optimizer)
        with reporter.scope({}):
            optimizer.update(model, *batch)
            found.append({**reporter.observation, "y": model.y})
    reported = [{name: np.array(v.array) for name, v in each.items()} for each in found]
    parameters = {name: np.array(p.array) for name, p in model.namedparams()}
    return parameters, reported, optimizer


def assert_same(one, other):
    for found, expected in zip(one, other, strict=True):
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name], name)


OPTIMIZERS = {
    "SGD": lambda: chainer.optimizers.SGD(0.1),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam": lambda: chainer.optimizers.Adam(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps(name):
    data = batches(100)
    expected = train(OPTIMIZERS[name](), data, graphs=False)
    found = train(OPTIMIZERS[name](), data, graphs=True)
    assert_same([found[0], *found[1]], [expected[0], *expected[1]])
    optimizer = found[2]
    counts = optimizer.cuda_graphs
    assert (counts.n_recorded, counts.n_launched) == (1, 95)
    assert optimizer.t == 100
