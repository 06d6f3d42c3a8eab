"""Networks that are channels last train as others do, and batch normalization with what follows.

On a GPU; expected values come from NumPy in float64, and from training in Chainer's order.
"""

import json

import numpy as np
import pytest

from chainer_fast.channels_last import layout

pytestmark = pytest.mark.gpu

SHAPES = {
    "first of ResNet-50": (4, 64, 112, 112),
    "3x3 of ResNet-50": (16, 256, 14, 14),
    "last of ResNet-50": (64, 2048, 7, 7),
    "no power of two": (3, 24, 13, 5),
    "four channels": (5, 4, 9, 8),
    "one image": (1, 8, 3, 3),
}
EPS, DECAY = 2e-5, 0.9


@pytest.fixture
def normalizer(device):
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    from chainer_fast.cudnn.fused_normalization import the_fused_normalizer

    device.use()
    return the_fused_normalizer()


@pytest.fixture
def normalize(normalizer, device):
    """Return a function that normalizes on the GPU, and gives all results."""
    from chainer_fast.cudnn.fused_normalization import Normalization, Then

    xp = device.xp

    def run(x, gamma, beta, z, gy, then):
        flat = (np.ascontiguousarray(layout.as_stored(each)) for each in (x, z, gy))
        x, z, gy = (layout.as_shaped(xp.asarray(each)) for each in flat)
        averages = [xp.asarray(np.full(gamma.shape, value, "f")) for value in (0, 1)]
        gamma, beta = xp.asarray(gamma), xp.asarray(beta)
        call = Normalization(normalizer, x, gamma, beta, EPS, DECAY, averages)
        y = call.launch(Then(then), z if then == Then.ADD_RELU else None)
        passed = call.pass_through(gy, y) if then else gy
        gz = passed if then == Then.ADD_RELU else None
        found = {"y": y, "gz": gz, "mean": averages[0], "var": averages[1]}
        found |= dict(zip(("gx", "ggamma", "gbeta"), call.gradients(passed), strict=True))
        assert layout.is_channels_last(y)
        assert layout.is_channels_last(found["gx"])
        return {name: to_host(each) for name, each in found.items() if each is not None}

    return run


def to_host(array):
    found = layout.as_shaped(layout.as_stored(array).get()) if array.ndim == 4 else array.get()
    return found.astype("d")


def draw(shape):
    random = np.random.default_rng(0)
    x, z, gy = (random.normal(0.2, 1, shape).astype("e") for _ in range(3))
    gamma, beta = (random.uniform(0.5, 1.5, shape[1]).astype("f") for _ in range(2))
    return x, gamma, beta, z, gy


def expected(found, x, gamma, beta, z, gy, then):
    """Return the results in float64; where y is 0, is what was found."""
    x, z, gy, gamma, beta = (each.astype("d") for each in (x, z, gy, gamma, beta))
    axes, spread = (0, 2, 3), (None, slice(None), None, None)
    mean, var = x.mean(axes), x.var(axes)
    inv_std = (var + EPS) ** -0.5
    x_hat = (x - mean[spread]) * inv_std[spread]
    y = gamma[spread] * x_hat + beta[spread] + (z if then == 2 else 0)
    g = gy * (found["y"] > 0) if then else gy
    gbeta, ggamma = g.sum(axes), (g * x_hat).sum(axes)
    n = x.size // x.shape[1]
    gx = (gamma * inv_std)[spread] * (g - (gbeta[spread] + x_hat * ggamma[spread]) / n)
    wanted = {"y": np.maximum(y, 0) if then else y, "gx": gx, "ggamma": ggamma, "gbeta": gbeta}
    wanted |= {"mean": (1 - DECAY) * mean, "var": DECAY + (1 - DECAY) * var * n / (n - 1)}
    return wanted | ({"gz": g} if then == 2 else {})


@pytest.mark.parametrize("then", [0, 1, 2], ids=["alone", "with ReLU", "with an addition"])
@pytest.mark.parametrize("name", SHAPES)
def test_normalization_with_what_follows(name, then, normalize):
    arrays = draw(SHAPES[name])
    found = normalize(*arrays, then)
    wanted = expected(found, *arrays, then)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(found[key], value, rtol=0, atol=4e-3 * scale, err_msg=key)


@pytest.mark.parametrize("then", [1, 2])
def test_what_is_not_finite_reaches_the_gradients(then, normalize):
    x, *others = draw((4, 8, 5, 6))
    x[1, 3, 2, 2] = np.inf
    found = normalize(x, *others, then)
    assert np.isnan(found["gx"][:, 3]).all()
    assert np.isfinite(np.delete(found["gx"], 3, 1)).all()


SCRIPT = """
import json
import chainer, numpy as np
import chainer.functions as F, chainer.links as L

SIZE, N_STEPS = 8, 10
device = chainer.get_device("@cupy:0")
device.use()


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.net = L.ResNet50Layers(None)

    def forward(self, x, t):
        y = self.net(x, layers=["fc6"])["fc6"]
        loss = F.softmax_cross_entropy(y, t)
        chainer.report({"loss": loss}, self)
        return loss


def train(dtype, mode, graphs):
    np.random.seed(0)
    with chainer.using_config("dtype", dtype), chainer.using_config("compute_mode", mode):
        model = Net()
        model.to_device(device)
        optimizer = chainer.optimizers.MomentumSGD(0.005).setup(model)
        if dtype is chainer.mixed16:
            optimizer.use_fp32_update()
            optimizer.loss_scaling(scale=128)
        if graphs:
            optimizer.use_cuda_graphs()
        random = np.random.default_rng(1)
        reporter = chainer.Reporter()
        reporter.add_observer("main", model)
        losses = []
        for _ in range(N_STEPS):
            x = random.normal(size=(SIZE, 3, 224, 224)).astype(chainer.get_dtype())
            t = random.integers(0, 1000, SIZE).astype("i")
            with reporter.scope({}):
                optimizer.update(model, device.send(x), device.send(t))
                losses.append(reporter.observation["main/loss"])
        filters = model.net.conv1.W.array
        assert filters.shape == (64, 3, 7, 7)
        made = optimizer.cuda_graphs
        if graphs:
            assert made.n_launched >= 3, made.n_eager
            assert made.n_fused == 49, made.n_fused
        return [float(loss.array) for loss in losses]


print(json.dumps({
    "single": train(np.float32, None, False),
    "mixed": train(chainer.mixed16, None, False),
    "last": train(chainer.mixed16, "cudnn_fast", False),
    "graphs": train(chainer.mixed16, "cudnn_fast", True),
}))
"""


def test_the_first_losses_of_resnet_50(device, python):
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    found = json.loads(python(SCRIPT, CHAINER_COMPAT_CUDNN="1").splitlines()[-1])
    expected = np.array(found["single"])
    assert (expected > 1).all()
    apart = np.abs(np.array(found["mixed"]) / expected - 1).max()
    for name in ("last", "graphs"):
        np.testing.assert_allclose(found[name], expected, rtol=max(0.02, 3 * apart), err_msg=name)
