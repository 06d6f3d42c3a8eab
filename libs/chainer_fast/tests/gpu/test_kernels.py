"""Kernels for large arrays and for all parameters give the same numbers as Chainer's own."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda

from chainer_fast.channels_last.layout import as_shaped
from chainer_fast.repairs import bandwidth

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_at_full_bandwidth(dtype, device):
    """Kernels that move 16 bytes at a time give the same numbers as CuPy's own."""
    device.use()
    random = np.random.default_rng(0)
    x, gy = (device.send(random.normal(size=(3, 64, 57, 64)).astype(dtype)) for _ in range(2))
    x.ravel()[:5] = device.send(np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype))
    assert x.nbytes >= bandwidth.WORTHWHILE_BYTES
    variable = chainer.Variable(x)
    y = F.relu(variable)
    (gradient,) = chainer.grad([y], [variable], [chainer.Variable(gy)])
    sum_ = variable + chainer.Variable(gy)
    for found, expected in (
        (y, device.xp.maximum(x, 0)),
        (gradient, device.xp.where(x > 0, gy, 0).astype(dtype)),
        (sum_, x + gy),
    ):
        np.testing.assert_array_equal(cuda.to_cpu(found.array), cuda.to_cpu(expected))


STEPS = {
    "SGD": chainer.optimizers.SGD,
    "MomentumSGD": chainer.optimizers.MomentumSGD,
    "CorrectedMomentumSGD": chainer.optimizers.CorrectedMomentumSGD,
    "NesterovAG": chainer.optimizers.NesterovAG,
    "Adam": chainer.optimizers.Adam,
    "AMSGrad": lambda: chainer.optimizers.Adam(amsgrad=True),
    "AdaBound": lambda: chainer.optimizers.Adam(adabound=True),
    "AdaDelta": chainer.optimizers.AdaDelta,
    "AdaGrad": chainer.optimizers.AdaGrad,
    "MSVAG": chainer.optimizers.MSVAG,
    "RMSprop": chainer.optimizers.RMSprop,
    "RMSpropGraves": chainer.optimizers.RMSpropGraves,
    "SMORMS3": chainer.optimizers.SMORMS3,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_all_parameters_at_once(device, name, monkeypatch):
    """Steps of all parameters at once give the same numbers as single ones, bit for bit."""
    device.use()

    def train():
        random = np.random.default_rng(0)
        model = chainer.Link()
        with model.init_scope():
            for k, dtype in enumerate(["e", "f", "e", "f"]):
                values = random.normal(size=(k + 1, 5000)).astype(dtype)
                setattr(model, f"p{k}", chainer.Parameter(values))
        model.to_device(device)
        with model.init_scope():
            values = device.send(random.normal(size=(9, 3, 3, 64)).astype("e"))
            model.filters = chainer.Parameter(as_shaped(values))
        optimizer = STEPS[name]().setup(model)
        optimizer.use_fp32_update()
        optimizer.loss_scaling(scale=100.0)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        for _ in range(4):
            for parameter in model.params():
                gradient = random.normal(size=parameter.shape).astype(parameter.dtype)
                parameter.grad, parameter._loss_scale = device.send(gradient), 100.0
            optimizer.update()
        return {name: parameter.array.get() for name, parameter in model.namedparams()}

    at_once = train()
    for owner, method in [("GradientMethod", "update"), ("Optimizer", "call_hook")]:
        class_ = getattr(chainer.optimizer, owner)
        monkeypatch.setattr(class_, method, getattr(class_, method).__wrapped__)
    for parameter, array in train().items():
        np.testing.assert_array_equal(array, at_once[parameter], parameter)
