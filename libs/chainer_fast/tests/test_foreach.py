"""One launch for many arrays computes the same as one launch per array, bit for bit."""

import contextlib
import itertools
import warnings
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda

from chainer_fast import updates
from chainer_fast.channels_last import layout
from chainer_fast.foreach import Calls, Later
from chainer_fast.repairs import launches, waits
from libs.chainer_fast.tests.stand_in_kernels import Array, Kernel, to_gpu, undo_repairs

#: In pieces of 4096 elements: three, exactly one, and less than one.
SHAPES = [(3, 3000), (4096,), (1,), (7, 5)]
XP = SimpleNamespace(
    all=np.all,
    isfinite=np.isfinite,
    ndarray=Array,
    asarray=to_gpu,
    empty=lambda shape, dtype: to_gpu(np.full(shape, np.nan, dtype)),
    empty_like=lambda array, dtype=None: np.full_like(array, np.nan, dtype),
    zeros=lambda shape, dtype: to_gpu(np.zeros(shape, dtype)),
    zeros_like=np.zeros_like,
)
AXPY = Kernel("T a, T x, float32 b", "T y", "y = a * x + (T)b", "axpy")


class Gpu(chainer.backend.Device):
    """A GPU that computes with `Kernel`."""

    xp = XP
    create_context = staticmethod(contextlib.nullcontext)

    def __eq__(self, other):
        return isinstance(other, Gpu)

    def send(self, array):
        return array


@pytest.fixture(autouse=True)
def launched(monkeypatch, compiled):
    """Make Chainer see a GPU; return a list that records the names of launched kernels."""
    made = {}

    def elementwise(*texts):
        return made.setdefault(texts, Kernel(*texts))

    monkeypatch.setattr(cuda, "elementwise", elementwise)
    monkeypatch.setattr(cuda, "ndarray", Array)
    monkeypatch.setattr(cuda, "cupy", XP)
    monkeypatch.setattr(chainer.Parameter, "device", Gpu())
    for rule in (chainer.optimizers.sgd.SGDRule, chainer.optimizers.momentum_sgd.MomentumSGDRule):
        monkeypatch.setattr(rule, "_kernel", None)
    monkeypatch.setattr(chainer.optimizers.adam.AdamRule, "_kernel", None)
    monkeypatch.setattr(Kernel, "launches", [])
    monkeypatch.setattr(Kernel, "compiled", staticmethod(compiled), raising=False)
    return Kernel.launches


@pytest.fixture
def repair(monkeypatch):
    """Undo the repairs; return a function that makes them again."""
    undo_repairs(monkeypatch)

    def repair():
        launches.update_parameters_at_once(chainer.optimizer)
        waits.look_at_all_gradients_at_once(chainer.optimizer)

    return repair


def arrays(dtypes, seed=0):
    random = np.random.default_rng(seed)
    pairs = itertools.product(SHAPES, dtypes)
    return [to_gpu(random.normal(size=shape).astype(dtype)) for shape, dtype in pairs]


def model_with(*arrays):
    """Return a link whose parameters ``p0``, ``p1`` and so on are these arrays."""
    model = chainer.Link()
    with model.init_scope():
        for k, array in enumerate(arrays):
            setattr(model, f"p{k}", chainer.Parameter(array))
    return model


def test_launches_are_as_many_as_dtypes_and_scalars(launched):
    calls, results = Calls(XP), []
    for dtype, a in itertools.product(["f4", "f8"], [2, 3]):
        for x, y in zip(arrays([dtype]), arrays([dtype], 1), strict=True):
            calls.add(AXPY, a, x, 0.5, y)
            results.append((a * x + x.dtype.type(0.5), y))
    assert launched == []
    calls.run()
    assert launched == ["axpy_for_all"] * 4
    assert all((expected == y).all() for expected, y in results)
    calls.run()
    assert len(launched) == 4


def test_what_cannot_be_launched_together_is_launched_alone(launched, monkeypatch):
    x, y = to_gpu(np.ones((2, 3), "f")), to_gpu(np.zeros((2, 3), "f"))
    calls = Calls(XP)
    calls.add(AXPY, 2, x, 1, y)
    calls.run()
    assert (launched, y.tolist()) == (["axpy"], [[3] * 3] * 2)
    alone = []
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: alone.append(args))
    empty = to_gpu(np.zeros(0, "f"))
    with_gaps = [array[:, ::2] for array in (x, y)]
    for given in [with_gaps, (x, y.T), (x[0], y), (empty, empty)]:
        calls.add(AXPY, 2, given[0], 1, given[1])
    calls.run()
    assert [(args[1].shape, args[3].shape) for args in alone] == [
        *[((2, 2), (2, 2)), ((2, 3), (3, 2)), ((3,), (2, 3))],
    ]


def test_kernels_wait_that_are_given_an_array_that_waits(launched):
    calls = Calls(XP)
    xs, ys = arrays(["f4"]), arrays(["f4"])
    for x, y in zip(xs, ys, strict=True):
        AXPY(1, Later(x, calls), 1, y)
    assert launched == []
    calls.run()
    assert launched == ["axpy_for_all"]
    assert all((y == x + 1).all() for x, y in zip(xs, ys, strict=True))


def channels_last(array):
    return layout.converted(np, array).view(Array)


def test_arrays_in_one_order_of_memory_are_launched_together(launched):
    random = np.random.default_rng(0)
    pairs = []
    for shape in [(2, 3, 4, 5), (4, 3, 1, 2), (1, 3, 2, 2), (5, 1, 2, 2), (2, 3, 1, 1)]:
        x, y = (random.normal(size=shape).astype("f") for _ in range(2))
        pairs.append((channels_last(to_gpu(x)), channels_last(to_gpu(y)), 2 * x + 1))
    calls = Calls(XP)
    for x, y, _ in pairs:
        calls.add(AXPY, 2, x, 1, y)
    calls.run()
    assert launched == ["axpy_for_all"]
    for _, y, expected in pairs:
        np.testing.assert_array_equal(y, expected)


MODELS = {"float32": ["f4"], "mixed": ["f2", "f4"]}
OPTIMIZERS = {
    "SGD": lambda: chainer.optimizers.SGD(0.3),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.3),
    "Adam": lambda: chainer.optimizers.Adam(weight_decay_rate=0.1),
}


def train(optimizer, dtypes, prepare=lambda optimizer: None, loss_scale=None):
    """Take three steps; return each parameter's arrays and states."""
    model = model_with(*arrays(dtypes))
    optimizer.setup(model)
    optimizer.use_fp32_update()
    prepare(optimizer)
    if loss_scale is not None:
        optimizer.loss_scaling(scale=loss_scale)
    for seed in (1, 2, 3):
        for parameter, gradient in zip(model.params(), arrays(dtypes, seed), strict=True):
            parameter.grad, parameter._loss_scale = gradient, loss_scale
        optimizer.update()
    return {
        (name, what): np.array(array)
        for name, parameter in model.namedparams()
        for what, array in {
            "array": parameter.array,
            "grad": parameter.grad,
            "t": parameter.update_rule.t,
            "copy": getattr(parameter.update_rule._fp32_param, "array", 0),
            **parameter.update_rule.state,
        }.items()
    }


def assert_same(results, others):
    assert results.keys() == others.keys()
    for key, array in results.items():
        assert array.dtype == others[key].dtype
        np.testing.assert_array_equal(array, others[key], str(key))


@pytest.mark.parametrize("dtypes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, dtypes, launched, repair):
    scale = None if dtypes == ["f4"] else 100.0
    expected = train(OPTIMIZERS[name](), dtypes, loss_scale=scale)
    n_alone = len(launched)
    launched.clear()
    repair()
    assert_same(train(OPTIMIZERS[name](), dtypes, loss_scale=scale), expected)
    # The first step creates states and copies.
    assert len(launched) == n_alone // 3 + 2 * (1 if scale is None else 4)


@pytest.mark.parametrize("otherwise", ["nothing", "gradient", "state", "copy"])
def test_filters_channels_last(otherwise, launched, repair):
    """Whatever lies otherwise than its parameter is brought into its order, once."""

    def train(lay):
        random = np.random.default_rng(0)
        shapes = (8, 3, 3, 3), (4, 8, 3, 3)
        filters = [to_gpu(random.normal(size=shape).astype("f2")) for shape in shapes]
        model = model_with(*map(lay, filters))
        optimizer = OPTIMIZERS["MomentumSGD"]().setup(model)
        optimizer.use_fp32_update()
        for step in range(3):
            for parameter, like in zip(model.params(), filters, strict=True):
                gradient = to_gpu(random.normal(size=like.shape).astype("f2"))
                parameter.grad = gradient if otherwise == "gradient" else lay(gradient)
                rule = parameter.update_rule
                if step == 1 and otherwise == "state":
                    rule.state["v"] = rule.state["v"].copy()
                elif step == 1 and otherwise == "copy":
                    rule._fp32_param.array = rule._fp32_param.array.copy()
            launched.clear()
            optimizer.update()
        return [
            (p.array, p.grad, p.update_rule.state["v"], p.update_rule._fp32_param.array)
            for p in model.params()
        ]

    repair()
    expected = train(lambda array: array)
    found = train(channels_last)
    assert launched == ["widen_for_all", "momentum_sgd_for_all", "narrow_for_all"]
    for arrays, others in zip(found, expected, strict=True):
        for array, other in zip(arrays, others, strict=True):
            assert layout.as_stored(array).flags.c_contiguous
            np.testing.assert_array_equal(array, other)


def decay_all(optimizer):
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.25))


def decay_each(optimizer):
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.25))


@pytest.mark.parametrize(("prepare", "n_steps"), [(decay_all, 3), (decay_each, 2)])
@pytest.mark.parametrize("dtypes", MODELS.values(), ids=MODELS)
def test_weight_decay(dtypes, prepare, n_steps, launched, repair):
    expected = train(chainer.optimizers.SGD(0.3), dtypes, prepare, 4.0)
    launched.clear()
    repair()
    assert_same(train(chainer.optimizers.SGD(0.3), dtypes, prepare, 4.0), expected)
    kernels = 1 if prepare is decay_each and "f2" not in dtypes else len(dtypes)
    assert launched.count("weight_decay_for_all") == n_steps * kernels
    assert launched.count("weight_decay") == (3 - n_steps) * 4 * len(dtypes)


def test_many_parameters_in_portions(launched, repair, monkeypatch):
    """Of 9000, 4096, 1 and 35 elements, only the second and third fit together."""
    expected = train(OPTIMIZERS["SGD"](), ["f4"])
    launched.clear()
    monkeypatch.setattr(updates, "MOST_ELEMENTS", 4097)
    repair()
    assert_same(train(OPTIMIZERS["SGD"](), ["f4"]), expected)
    # The first step creates states.
    assert launched == ["sgd"] * 4 + ["sgd", "sgd_for_all", "sgd"] * 2


def hook_one(optimizer):
    optimizer.target.p1.update_rule.add_hook(lambda rule, p: p.grad.fill(1), "ones")


def freeze_one(optimizer):
    optimizer.target.p1.update_rule.enabled = False
    optimizer.target.p1.update_rule._state = {}


def set_another_rate(optimizer):
    optimizer.target.p1.update_rule.hyperparam.lr = 0.1


class Custom(chainer.optimizers.sgd.SGDRule):
    def update_core_gpu(self, parameter):
        parameter.data -= parameter.grad


def replace_a_rule(optimizer):
    optimizer.target.p1.update_rule = Custom(optimizer.hyperparam)


class Clipped(chainer.Parameter):
    def update(self):
        super().update()
        self.array[...] = np.clip(self.array, -1, 1)


def replace_a_parameter(optimizer):
    optimizer.target.p1.__class__ = Clipped


UNUSUAL = [hook_one, freeze_one, set_another_rate, replace_a_rule, replace_a_parameter]


@pytest.mark.parametrize("prepare", UNUSUAL)
def test_what_is_unusual_about_a_parameter_is_heeded(prepare, repair):
    expected = train(chainer.optimizers.SGD(0.3), ["f4"], prepare)
    repair()
    assert_same(train(chainer.optimizers.SGD(0.3), ["f4"], prepare), expected)


def share_an_array(model):
    model.p1.array = model.p0.array


def share_a_gradient(model):
    model.p1.grad = model.p0.grad


def share_a_rule(model):
    model.p1.update_rule = model.p0.update_rule


def train_alike(change):
    """Take three steps with parameters of one shape; return the parameters."""
    model = model_with(*(to_gpu(np.ones((2, 3), "f4")) for _ in range(3)))
    optimizer = chainer.optimizers.MomentumSGD(0.25).setup(model)
    for seed in (1, 2, 3):
        random = np.random.default_rng(seed)
        for parameter in model.params():
            parameter.grad = to_gpu(random.normal(size=(2, 3)).astype("f4"))
        change(model)
        optimizer.update()
    return {name: np.array(parameter.array) for name, parameter in model.namedparams()}


@pytest.mark.parametrize("change", [share_an_array, share_a_gradient, share_a_rule])
def test_what_is_shared_is_changed_by_one_kernel_after_the_other(change, launched, repair):
    expected = train_alike(change)
    launched.clear()
    repair()
    assert_same(train_alike(change), expected)
    assert launched == ["momentum_sgd"] * 9


def test_a_state_on_another_gpu_is_moved_by_chainer(launched, repair):
    class Elsewhere(Array):
        device = SimpleNamespace(id=1)

    def move_a_state(model):
        state = model.p1.update_rule.state or {}
        for name, array in state.items():
            state[name] = array.view(Elsewhere)

    repair()
    train_alike(move_a_state)
    assert launched == ["momentum_sgd"] * 9


def test_gradients_of_which_one_is_not_finite(launched, repair):
    repair()
    model = model_with(*arrays(["f2", "f4"]))
    optimizer = chainer.optimizers.SGD().setup(model)
    optimizer.loss_scaling()
    for parameter, gradient in zip(model.params(), arrays(["f2", "f4"]), strict=True):
        parameter.grad = gradient
    optimizer.check_nan_in_grads()
    assert optimizer.is_safe_to_update()
    assert launched == ["look_for_all"] * 2
    for value, parameter in itertools.product([np.inf, -np.inf, np.nan], model.params()):
        before, parameter.grad[..., -1] = parameter.grad[..., -1].copy(), value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.check_nan_in_grads()
        assert not optimizer.is_safe_to_update()
        parameter.grad[..., -1] = before


def test_gradients_that_are_not_of_cupy_are_looked_at_by_chainer(monkeypatch, launched, repair):
    class OtherGpu(Gpu):
        xp = SimpleNamespace(all=np.all, isfinite=np.isfinite)  # such as ChainerX

    repair()
    model = model_with(to_gpu(np.ones(3, "f4")))
    optimizer = chainer.optimizers.SGD().setup(model)
    optimizer.loss_scaling()
    model.p0.grad = to_gpu(np.array([1, np.inf, 2], "f4"))
    monkeypatch.setattr(chainer.Parameter, "device", OtherGpu())
    with pytest.warns(UserWarning, match=r"Non finite number found in param\.grad of /p0"):
        optimizer.check_nan_in_grads()
    assert launched == []
