"""Batch normalization with ReLU and an addition in one kernel, on a stand-in for cuDNN.

Expected values come from Chainer, in float64, without any of this.
"""

import contextlib
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.functions.activation.relu import ReLU
from chainer.functions.normalization import batch_normalization

from chainer_fast.channels_last.fusing import Fused, Observed
from chainer_fast.channels_last.layout import MODE, converted, is_channels_last
from chainer_fast.cudnn.fused_normalization import Then

SHAPE = (3, 8, 5, 6)
ALONE, WITH_RELU, WITH_ADDITION = "batchnorm_0", "batchnorm_1", "batchnorm_2"


@pytest.fixture
def computed(stand_in, fuse, monkeypatch):
    """Send functions in host memory to the stand-in; return a function that tells what it did."""
    monkeypatch.setattr(chainer.global_config, "use_ideep", "never")
    monkeypatch.setattr(batch_normalization, "cuda", SimpleNamespace(cupy=np))
    cudnn = stand_in("cudnn")
    library = stand_in("functions").Functions(cudnn)
    fuse(cudnn, library, stand_in("host_gpu").HostGpu(), "forward_cpu")

    def names():
        found = [entry[0] for entry in cudnn.log if isinstance(entry, tuple)]
        cudnn.log.clear()
        return [name for name in found if name.startswith("batchnorm")]

    return names


def last(array):
    return converted(np, array)


def draw(random, dtype):
    """Return two batches of images, which lie channels last in float16."""
    place = last if dtype == "f2" else np.asarray
    images = (random.uniform(-1, 1, SHAPE).astype("f2").astype(dtype) for _ in range(2))
    return [chainer.Variable(place(each)) for each in images]


class Layers:
    """Batch normalizations, each with its parameters and averages."""

    def __init__(self, dtype, n=4):
        random = np.random.RandomState(1)
        wide = "f4" if dtype == "f2" else dtype
        self.parameters = [
            chainer.Parameter(random.uniform(0.5, 1.5, SHAPE[1]).astype("f4").astype(wide))
            for _ in range(2 * n)
        ]
        self.averages = [np.full(SHAPE[1], k % 2, wide) for k in range(2 * n)]
        self.n_calls = 0

    def __call__(self, x):
        k = 2 * self.n_calls
        self.n_calls += 1
        mean, var = self.averages[k : k + 2]
        return F.batch_normalization(
            x, *self.parameters[k : k + 2], running_mean=mean, running_var=var
        )


def run(model, dtype, step=contextlib.nullcontext):
    """Return the result, gradients and averages, in float64."""
    random = np.random.RandomState(0)
    images = draw(random, dtype)
    weights = random.uniform(-1, 1, SHAPE).astype("f2").astype(dtype)
    layers = Layers(dtype)
    with step():
        y = model(layers, *images)
        loss = F.sum(F.cast(y, "f8") * weights.astype("f8"))
        loss.backward()
    found = [y, *(v.grad_var for v in (*images, *layers.parameters) if v.grad_var is not None)]
    return [np.array(v.array, "f8") for v in found] + [np.array(a, "f8") for a in layers.averages]


def compare(model, step=contextlib.nullcontext, dtype="f2"):
    expected = run(model, "f8")
    for got, wanted in zip(run(model, dtype, step), expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-2 * scale)


def plan_of(model):
    observed = Observed()
    compare(model, observed.step)
    return observed.plan()


def both_ways(plan):
    """Return steps that fuse, with and without what lies between."""
    return [Fused(plan, leaves_out=leaves_out) for leaves_out in (False, True)]


def residual(bn, x, z):
    return F.relu(bn(x) + z)


def two_blocks(bn, x, z):
    h = F.relu(z + bn(F.relu(bn(x))))
    return F.relu(bn(h) + h)


FUSED = {
    "basic": (lambda bn, x, z: F.relu(bn(x)), {0: Then.RELU}),
    "residual": (residual, {0: Then.ADD_RELU}),
    "projected": (lambda bn, x, z: F.relu(bn(x) + bn(z)), {0: Then.ADD_RELU}),
    "two blocks": (two_blocks, {0: Then.RELU, 1: Then.ADD_RELU, 2: Then.ADD_RELU}),
}


@pytest.mark.parametrize("model, plan", FUSED.values(), ids=FUSED)
def test_what_follows_is_computed_by_the_same_kernel(model, plan, computed):
    assert plan_of(model) == plan
    alone = computed()
    assert set(alone) == {ALONE, "batchnorm_backward_0"}
    complete, without = both_ways(plan)
    for step in (complete, without):
        compare(model, step.step)
        assert step.n_fused == len(plan)
        done = computed()
        assert done.count(ALONE) == alone.count(ALONE) - (step is without) * len(plan)
        together = [name for name in done if name in (WITH_RELU, WITH_ADDITION)]
        assert together == [f"batchnorm_{int(then)}" for then in plan.values()]
        gradients = [name for name in done if name.startswith("batchnorm_backward")]
        assert gradients.count("batchnorm_backward_0") == alone.count(ALONE) - len(plan)
        assert len(gradients) == alone.count(ALONE)


def test_what_lies_between_changes_no_bits(computed):
    complete, without = (
        run(two_blocks, "f2", step.step) for step in both_ways(FUSED["two blocks"][1])
    )
    for one, other in zip(complete, without, strict=True):
        assert (one == other).all()


def test_results_and_gradients_lie_channels_last(computed):
    x, z = draw(np.random.RandomState(0), "f2")
    with Fused({0: Then.ADD_RELU}, leaves_out=True).step():
        y = residual(Layers("f2"), x, z)
        y.grad = np.ones(SHAPE, "f2")  # in Chainer's order
        y.backward()
    for array in (y.array, x.grad, z.grad):
        assert array.dtype == "f2"
        assert is_channels_last(array)


def kept(bn, x, z):
    bn.kept = bn(x)
    return F.relu(bn.kept)


def looked_at(bn, x, z):
    h = bn(x) + z
    bn.seen = float(h.array.sum())
    return F.relu(h)


def changed(bn, x, z):
    h = bn(x)
    h.array[:, 1] *= 2
    return F.relu(h)


OTHERWISE = {
    # How others read what a normalization gives.
    "twice": lambda h, x, z: F.relu(h) + h,
    "the sum twice": lambda h, x, z: (lambda total: F.relu(total) * total)(h + z),
    "added twice": lambda h, x, z: F.relu(h + h),
    "added to two": lambda h, x, z: F.relu(h + z) + (h + x),
    "rectified twice": lambda h, x, z: F.relu(h) + F.relu(h),
    "not rectified": lambda h, x, z: F.tanh(h),
    "only added": lambda h, x, z: h + z,
    "by another function": lambda h, x, z: F.relu(h + z) + F.tanh(h),
    "added to another shape": lambda h, x, z: F.relu(h + z[:1]),
}
NOT_FUSED = {
    name: lambda bn, x, z, read=read: read(bn(x), x, z) for name, read in OTHERWISE.items()
} | {"looked at": looked_at}


@pytest.mark.parametrize("model", NOT_FUSED.values(), ids=NOT_FUSED)
def test_what_somebody_else_may_read_is_not_fused(model, computed):
    assert plan_of(model) == {}


def test_what_code_changes_in_place_is_not_fused(computed):
    observed = Observed()
    run(changed, "f2", observed.step)
    assert observed.plan() == {}


ALL = (
    {name: model for name, (model, _) in FUSED.items()}
    | NOT_FUSED
    | {
        "kept": kept,
        "broadcast": lambda bn, x, z: F.relu(bn(x) + F.broadcast_to(z[:1], SHAPE)),
    }
)


@pytest.mark.parametrize("plan", [{0: Then.RELU, 1: Then.ADD_RELU}, {0: Then.ADD_RELU}])
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_a_model_that_does_something_else_than_before_gets_right_values(model, plan, computed):
    for step in both_ways(plan):
        compare(model, step.step)


def test_whoever_looks_at_an_array_sees_what_is_right(computed):
    def look(dtype, step=contextlib.nullcontext):
        seen = []

        def model(bn, x, z):
            result = looked_at(bn, x, z)
            seen.append(bn.seen)
            return result

        run(model, dtype, step)
        return seen

    expected = look("f8")
    for step in both_ways({0: Then.ADD_RELU}):
        np.testing.assert_allclose(look("f2", step.step), expected, rtol=1e-2)


def test_what_is_kept_is_there_after_the_step(computed):
    layers = Layers("f2")
    x = last(np.random.RandomState(0).uniform(-1, 1, SHAPE).astype("f2"))
    with Fused({0: Then.RELU}, leaves_out=True).step():
        F.sum(kept(layers, x, None)).backward()
    expected = Layers("f8")(x.astype("f8")).array
    np.testing.assert_allclose(layers.kept.array, expected, rtol=0, atol=1e-2)


def test_averages_move_although_nobody_reads_the_result(computed):
    def unread(bn, x, z):
        bn(x)
        return F.relu(z)

    compare(unread, Fused({0: Then.RELU}, leaves_out=True).step)
    with chainer.no_backprop_mode():
        layers = Layers("f2")
        with Fused({0: Then.RELU}, leaves_out=True).step():
            layers(last(np.ones(SHAPE, "f2")))
    assert (layers.averages[0] > 0).all()


def shared(bn, x, z):
    """Call a normalization twice, and read the results in another order."""
    one = bn(x)
    bn.n_calls = 0
    return F.relu(one + F.relu(bn(z)))


def test_averages_move_in_the_order_of_calls(computed):
    plan = plan_of(shared)
    assert plan == {0: Then.ADD_RELU, 1: Then.RELU}
    eager, complete, without = (
        run(shared, "f2", step)
        for step in (contextlib.nullcontext, *(each.step for each in both_ways(plan)))
    )
    assert any((one != 0).any() for one in eager[-8:-6])
    for one, *others in zip(eager[-8:], complete[-8:], without[-8:], strict=True):
        assert all((one == other).all() for other in others)


def evaluated(bn, x, z):
    h = bn(x)
    fixed = F.fixed_batch_normalization(z, *bn.parameters[2:4], *bn.averages[:2])
    return F.relu(h) + fixed


def test_whoever_reads_averages_sees_them_moved(computed):
    plan = plan_of(evaluated)
    assert plan == {0: Then.RELU}
    for step in both_ways(plan):
        compare(evaluated, step.step)
        assert step.n_fused == 1


class Hook(chainer.FunctionHook):
    """Sees what ReLU reads."""

    def forward_postprocess(self, function, in_data):
        if type(function) is ReLU:
            self.seen = np.abs(in_data[0])


def hooked(bn, x, z):
    h = bn(x) + z
    with Hook() as hook:
        return F.relu(h) + hook.seen


def hooked_alone(bn, x, z):
    relu, hook = ReLU(), Hook()
    relu.add_hook(hook)
    (y,) = relu.apply((bn(x),))
    return y + hook.seen


@pytest.mark.parametrize("model, then", [(hooked, Then.ADD_RELU), (hooked_alone, Then.RELU)])
def test_hooks_of_programs_see_what_is_right(model, then, computed):
    assert plan_of(model) == {}
    for step in both_ways({0: then}):
        compare(model, step.step)


def test_a_sum_in_another_dtype_is_not_fused(computed):
    def wide(bn, x, z):
        with chainer.using_config("type_check", False), chainer.no_backprop_mode():
            y = F.relu(bn(x) + F.cast(z, np.promote_types(x.dtype, "f4")))
        return F.cast(y, x.dtype) + x

    assert plan_of(wide) == {}
    for step in both_ways({0: Then.ADD_RELU}):
        compare(wide, step.step)


def test_the_comparison_shows_an_addend_that_changes_before_relu(computed):
    def changing(bn, x, z):
        z = z * 1
        h = bn(x) + z
        z.array[...] = 0
        return F.relu(h)

    complete, without = both_ways({0: Then.ADD_RELU})
    compare(changing, complete.step)
    assert (run(changing, "f2", without.step)[0] != run(changing, "f2", complete.step)[0]).any()


def test_gradients_that_nobody_asked_for_are_not_used_later(computed):
    def some(bn, x, z):
        y = F.relu(bn(x) + z)
        (gz,) = chainer.grad([F.sum(y)], [z])
        inputs = [x, *bn.parameters[:2]]
        gx, *_ = chainer.grad([F.sum(y * y)], inputs, enable_double_backprop=True)
        return y + gz.array + gx.array

    for step in both_ways(plan_of(some)):
        compare(some, step.step)
        assert step.n_fused == 1


def test_gradients_of_gradients(computed):
    def twice(dtype, step=contextlib.nullcontext):
        x, z = draw(np.random.RandomState(0), dtype)
        layers = Layers(dtype)
        with step():
            y = F.cast(residual(layers, x, z), "f8")
            inputs = [x, *layers.parameters[:2]]
            gradients = chainer.grad([F.sum(y * y) / 256], inputs, enable_double_backprop=True)
            squares = sum(F.sum(F.cast(g, "f8") ** 2) for g in gradients)
            (again,) = chainer.grad([squares], [x])
        return [np.array(v.array, "f8") for v in (*gradients, again)]

    expected = twice("f8")
    for step in (contextlib.nullcontext, *(each.step for each in both_ways({0: Then.ADD_RELU}))):
        for got, wanted in zip(twice("f2", step), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-2 * np.abs(wanted).max())


def test_other_channels_and_float32_go_the_usual_way(computed):
    random = np.random.RandomState(0)
    for shape, dtype in (((3, 6, 5, 4), "f2"), (SHAPE, "f4")):
        x = last(random.uniform(-1, 1, shape).astype(dtype))
        ones = np.ones(shape[1], "f4")
        y = F.batch_normalization(x, ones, ones).array
        np.testing.assert_allclose(y.mean((0, 2, 3)), 1, rtol=0, atol=1e-2)
        assert computed() == ["batchnorm"]


@pytest.mark.parametrize("seed", range(8))
def test_any_net_with_any_plan(seed, computed):
    """Nets of random functions, which all plans must leave right."""

    def net(bn, x, z):
        random = np.random.RandomState(seed)
        arrays = [x, z]
        for _ in range(8):
            one, other = (arrays[random.randint(len(arrays))] for _ in range(2))
            kind = random.choice(["normalize", "add", "relu", "relu"])
            if kind == "normalize" and bn.n_calls < 4:
                arrays.append(bn(one))
            elif kind == "add":
                arrays.append((one + other) * 0.5)
                arrays.append(one + other)
            else:
                arrays.append(F.relu(one))
            if random.randint(3) == 0 and len(arrays) > 2:
                arrays.pop(random.randint(len(arrays)))
        return sum(arrays[1:], arrays[0]) * 0.25

    plan = plan_of(net)
    random = np.random.RandomState(100 + seed)
    any_plan = {k: Then(random.randint(1, 3)) for k in range(4) if random.randint(3)}
    for step in (*both_ways(plan), *both_ways(any_plan)):
        compare(net, step.step)


class Net(chainer.Chain):
    """A small ResNet."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, 2, 1, nobias=True)
            self.convs = chainer.ChainList(*(L.Convolution2D(8, 8, 3, pad=1) for _ in range(2)))
            self.normalize = chainer.ChainList(*(L.BatchNormalization(8) for _ in range(3)))
            self.last = L.Linear(8, 5)

    def forward(self, x, t):
        x = F.relu(self.normalize[0](self.first(x)))
        h = F.relu(self.normalize[1](self.convs[0](x)))
        x = F.relu(self.normalize[2](self.convs[1](h)) + x)
        return F.softmax_cross_entropy(self.last(F.mean(x, axis=(2, 3))), t)


def losses(dtype, values, steps):
    """Return the losses of some steps of training from the same values."""
    random = np.random.default_rng(0)
    with chainer.using_config("dtype", dtype):
        model = Net()
    for name, parameter in model.namedparams():
        parameter.array[...] = values[name]
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    optimizer.use_fp32_update()
    x = random.normal(size=(6, 3, 8, 8)).astype(np.float16)
    x, t = x.astype(model.first.W.dtype), random.integers(0, 5, 6).astype("i")
    found = []
    for step in steps:
        with step:
            loss = model(x, t)
            model.cleargrads()
            loss.backward(loss_scale=128)
        optimizer.loss_scaling(scale=128)
        optimizer.update()
        found.append(float(loss.array))
    return found


def test_the_first_losses_of_training(computed):
    values = {name: p.array.astype(np.float16) for name, p in Net().namedparams()}
    expected = losses(np.float64, values, [contextlib.nullcontext()] * 10)
    observed = Observed()
    with chainer.using_config("compute_mode", MODE):
        first = losses(chainer.mixed16, values, [observed.step()])
        plan = observed.plan()
        assert plan == {0: Then.RELU, 1: Then.RELU, 2: Then.ADD_RELU}
        steps = [Fused(plan, leaves_out=True).step() for _ in range(10)]
        found = losses(chainer.mixed16, values, steps)
    assert expected[0] > 1.3 * expected[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    np.testing.assert_allclose(first, expected[:1], rtol=1e-2)
