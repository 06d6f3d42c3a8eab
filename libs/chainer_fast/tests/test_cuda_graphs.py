"""Steps as graphs: the same as eager steps, bit for bit, on a stand-in for a GPU."""

import contextlib
import copy
import random
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.functions.activation.relu import ReLUGrad2

from chainer_fast.channels_last.layout import MODE, as_shaped
from chainer_fast.graphs.cuda_graphs import LAUNCHES_BETWEEN_LOOKS
from chainer_fast.graphs.drawing import draws
from chainer_fast.graphs.state import State
from chainer_fast.repairs import graphs, launches, waits
from libs.chainer_fast.tests.stand_in_kernels import Kernel, undo_repairs
from libs.chainer_fast.tests.stand_in_tape import (
    XP,
    Gpu,
    GpuArray,
    Stream,
    Tape,
    TapeKernel,
    do,
    get_array_module,
    to_gpu,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Non finite number found"),
    pytest.mark.filterwarnings("ignore:.* encountered in"),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch, compiled):
    made = {}
    monkeypatch.setattr(
        cuda, "elementwise", lambda *texts: made.setdefault(texts, TapeKernel(*texts))
    )
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
    undo_repairs(monkeypatch)
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
        if hasattr(self, "b2"):
            self.y += F.broadcast_to(self.b2, self.y.shape)
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
    reported = [{k: np.array(getattr(v, "array", v)) for k, v in each.items()} for each in found]
    parameters = {name: np.array(p.array) for name, p in model.namedparams()}
    return parameters, reported, optimizer


def assert_same(one, other):
    for found, expected in zip(one, other, strict=True):
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name], name)


def compare(make, data, **options):
    """Train with and without graphs; return the optimizer of the former."""
    expected = train(make(), data, graphs=False, **options)
    found = train(make(), data, graphs=True, **options)
    assert_same([found[0], *found[1]], [expected[0], *expected[1]])
    for one, other in zip(found[2].target.params(), expected[2].target.params(), strict=True):
        if one.update_rule is not None:
            assert one.update_rule.t == other.update_rule.t
            assert_same([one.update_rule.state], [other.update_rule.state])
    assert found[2].t == expected[2].t
    assert found[2]._loss_scale == expected[2]._loss_scale
    return found[2]


def launched(optimizer):
    return optimizer.cuda_graphs.n_launched


def sgd():
    return chainer.optimizers.SGD(0.1)


def momentum():
    return chainer.optimizers.MomentumSGD(0.1)


def adam():
    return chainer.optimizers.Adam(0.01, weight_decay_rate=0.1)


def amsbound():
    return chainer.optimizers.Adam(0.01, amsgrad=True, adabound=True)


@pytest.mark.parametrize("make", [sgd, momentum, adam, amsbound])
def test_optimizers(make):
    optimizer = compare(make, batches(30))
    assert optimizer.cuda_graphs.n_recorded == 1
    assert launched(optimizer) >= 24


def half(model):
    for parameter in model.params():
        parameter.array = to_gpu(parameter.array.astype(np.float16))
    return model


def mixed(optimizer):
    half(optimizer.target)
    optimizer.use_fp32_update()
    optimizer.loss_scaling(interval=3)


def half_batches(n, infinite=()):
    data = [tuple(to_gpu(a.astype(np.float16)) for a in batch) for batch in batches(n)]
    for k in infinite:
        data[k][0][1, 1] = np.inf
    return data


def rms():
    return chainer.optimizers.RMSprop(0.01)  # whose eps is 0 in float16


@pytest.mark.parametrize("make", [sgd, adam, rms])
def test_mixed_precision_skips_steps_that_overflow(make):
    data = half_batches(40, infinite=(2, 20, 21, 30))
    with pytest.warns(UserWarning, match="skipped, because a gradient was not finite"):
        optimizer = compare(make, data, prepare=mixed)
    assert launched(optimizer) > 25
    assert optimizer.cuda_graphs.n_recorded == 1
    assert next(optimizer.target.params()).update_rule.t == 36


class Filters(chainer.Chain):
    """Filters that multiply images. Their gradient lies in Chainer's order if ``reshapes``."""

    def __init__(self, w, reshapes):
        super().__init__()
        self.reshapes = reshapes
        with self.init_scope():
            self.w = chainer.Parameter(w)

    def forward(self, x, t):
        if not self.reshapes:  # also what a graph reads lies as what it was given
            assert x.strides == t.strides == self.w.array.strides
        w = F.reshape(F.reshape(self.w, (-1,)), x.shape) if self.reshapes else self.w
        self.y = x * w
        loss = F.sum(F.square(self.y - t))
        chainer.report({"loss": loss}, self)
        return loss


@pytest.mark.parametrize("reshapes", [False, True])
def test_filters_channels_last(reshapes):
    def channels_last(array):
        return to_gpu(array.transpose(0, 2, 3, 1).copy()).transpose(0, 3, 1, 2)

    def mixed(optimizer):
        optimizer.use_fp32_update()
        optimizer.loss_scaling(scale=4)

    def found(lay, graphs):
        random = np.random.default_rng(0)
        w, *images = (lay(random.normal(size=(2, 3, 4, 5)).astype("e")) for _ in range(25))
        data = list(zip(images[::2], images[1::2], strict=True))
        make, model = chainer.optimizers.MomentumSGD(0.01), Filters(w, reshapes)
        return train(make, data, graphs=graphs, prepare=mixed, model=model)

    eager, graphs = (found(channels_last, graphs) for graphs in (False, True))
    assert_same([graphs[0], *graphs[1]], [eager[0], *eager[1]])
    assert_same([graphs[0]], [found(to_gpu, False)[0]])
    assert launched(graphs[2]) >= 4
    rule = graphs[2].target.w.update_rule
    for array in (graphs[2].target.w.array, rule._fp32_param.array, rule.state["v"]):
        assert array.transpose(0, 2, 3, 1).flags.c_contiguous


def test_recording_takes_no_random_numbers():
    def shifted(x):
        draws().next_call()
        return x + draws().key[1].astype("f")

    def train_with(hook):
        model, found = Model(), []
        optimizer = sgd().setup(model)
        optimizer.use_cuda_graphs()
        for x, t in batches(12):
            with hook:
                optimizer.update(lambda x, t: model(shifted(x), t), x, t)
            found.append(np.array(model.y.array))
        return found, optimizer

    found, optimizer = train_with(contextlib.nullcontext())
    # While there is a hook of functions, nothing is recorded.
    expected, _ = train_with(chainer.FunctionHook())
    np.testing.assert_array_equal(found, expected)
    assert launched(optimizer) > 5


@pytest.mark.parametrize("make", [sgd, adam])
def test_values_that_are_not_finite(make):
    data = batches(20)
    data[12][0][0, 0] = np.nan
    assert launched(compare(make, data)) >= 14


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_constant_loss_scale(make):
    def prepare(optimizer):
        half(optimizer.target)
        optimizer.use_fp32_update()
        optimizer.loss_scaling(scale=64)

    optimizer = compare(make, half_batches(20), prepare=prepare)
    assert launched(optimizer) > 10


def schedule(k, optimizer):
    optimizer.hyperparam.lr = 0.1 / (1 + k)


def change_one(k, optimizer):
    if k == 10:
        optimizer.target.w1.update_rule.hyperparam.lr = 0.3


def set_by_hand(k, optimizer):
    if k in (8, 12):
        optimizer.lr *= 0.5


def clear_gradients(k, optimizer):
    optimizer.target.cleargrads()


def freeze(k, optimizer):
    if k == 10:
        optimizer.target.b1.update_rule.enabled = False
    if k == 15:
        optimizer.target.b1.update_rule.enabled = True


def scale_parameters(k, optimizer):
    if k == 10:
        optimizer.target.w1.array *= 2


def replace_a_parameter(k, optimizer):
    if k == 10:
        optimizer.target.w1.array = to_gpu(np.ones((5, 3), "f"))


def move(k, optimizer):
    if k == 10:
        for parameter in optimizer.target.params():
            parameter.array = to_gpu(parameter.array)
            state = parameter.update_rule.state
            state.update({name: to_gpu(array) for name, array in state.items()})


def add_a_parameter(k, optimizer):
    model = optimizer.target
    if k == 10:
        with model.init_scope():
            model.b2 = chainer.Parameter(to_gpu(np.ones(2, "f")))
        model.b2.update_rule = optimizer.create_update_rule()
    if k == 18:  # this one is never updated
        with model.init_scope():
            model.other = chainer.Parameter(to_gpu(np.ones(2, "f")))


def use_config(k, optimizer):
    chainer.config.train = k < 10


@pytest.mark.parametrize(
    "between",
    [
        schedule,
        change_one,
        set_by_hand,
        clear_gradients,
        freeze,
        scale_parameters,
        replace_a_parameter,
        move,
        add_a_parameter,
        use_config,
    ],
)
def test_what_a_script_does_between_steps(between):
    with chainer.using_config("train", True):
        optimizer = compare(momentum, batches(25), between=between)
    assert launched(optimizer) >= 6


def decay_all(optimizer):
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.25))


def decay_each(optimizer):
    for parameter in optimizer.target.params():
        parameter.update_rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.25))


def decay_all_mixed(optimizer):
    mixed(optimizer)
    decay_all(optimizer)


@pytest.mark.parametrize("prepare", [decay_all, decay_each, decay_all_mixed])
@pytest.mark.filterwarnings("ignore:.* skipped, because a gradient")
def test_weight_decay_follows_its_rate(prepare):
    def between(k, optimizer):
        rules = [optimizer, *(p.update_rule for p in optimizer.target.params())]
        for each in rules:
            for hook in each._hookable._pre_update_hooks.values():
                hook.rate = 0.25 / (1 + k)

    data = half_batches(20) if prepare is decay_all_mixed else batches(20)
    optimizer = compare(momentum, data, prepare=prepare, between=between)
    assert launched(optimizer) >= 10


def test_another_shape_gets_another_graph():
    small, large = batches(40, size=3), batches(40)
    data = [small[k] if k % 5 == 4 else large[k] for k in range(40)]
    optimizer = compare(momentum, data)
    assert optimizer.cuda_graphs.n_recorded == 2
    assert launched(optimizer) >= 25


def test_what_a_script_keeps_stays():
    _, reported, optimizer = train(momentum(), batches(100), graphs=True)
    assert launched(optimizer) >= 94
    losses = [each["main/loss"].item() for each in reported]
    assert len(set(losses)) == 100  # each step has its own


@pytest.mark.filterwarnings("ignore:.* skipped, because a gradient")
@pytest.mark.parametrize(("prepare", "at"), [(mixed, 0), (None, 0), (None, 12)])
def test_snapshots_and_resuming(prepare, at, tmp_path):
    data = half_batches(40, infinite=(25,)) if prepare else batches(40)

    def run(graphs):
        folder = tmp_path / str(graphs)
        folder.mkdir()
        _, _, first = train(adam(), data[:30], graphs=graphs, prepare=prepare)
        chainer.serializers.save_npz(folder / "optimizer.npz", first)
        chainer.serializers.save_npz(folder / "model.npz", first.target)

        def load(k, optimizer):
            if k == at:
                chainer.serializers.load_npz(folder / "optimizer.npz", optimizer)
                chainer.serializers.load_npz(folder / "model.npz", optimizer.target)
                optimizer._loss_scale = first._loss_scale

        return first, *train(
            adam(), data[:at] + data[30:] + data[:20], graphs=graphs, prepare=prepare, between=load
        )

    expected_first, expected, expected_reports, _ = run(False)
    first, found, reports, second = run(True)
    assert first._loss_scale == expected_first._loss_scale
    assert_same([found, *reports], [expected, *expected_reports])
    assert second.t == 60
    assert launched(second) >= 20


class Looks(Model):
    def forward(self, x, t):
        loss = super().forward(x, t)
        self.is_large = float(loss.array) > 1
        return loss


class Remembers(Model):
    before = 0

    def forward(self, x, t):
        loss = super().forward(x + self.before, t)
        self.before = x.copy()
        return loss


class Counts(Model):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x, t):
        self.n += 1
        return super().forward(x, t) * (1 + self.n % 2)


class ReportsNumbers(Model):
    def forward(self, x, t):
        chainer.report({"size": 4}, self)
        return super().forward(x, t)


class Replaces(Model):
    def __init__(self):
        super().__init__()
        self.add_persistent("mean", to_gpu(np.zeros(3, "f")))

    def forward(self, x, t):
        self.mean = self.mean * 0.5 + x.mean(axis=0)
        return super().forward(x, t)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Looks, "operation not permitted when stream is capturing"),
        (
            Remembers,
            r"because it reads what it kept in the step before \(Remembers.y, Remembers.before\)",
        ),
        (Counts, "in 64 steps, settings or attributes of links differed each time"),
        (ReportsNumbers, "it reports 'main/size', which is not in GPU memory"),
        (Replaces, "/mean is replaced in each step"),
    ],
)
def test_a_model_that_cannot_be_recorded(model, reason):
    data = batches(80)
    expected = train(momentum(), data, graphs=False, model=model())
    with pytest.warns(UserWarning, match=f"no CUDA graphs: .*{reason}") as warned:
        found = train(momentum(), data, graphs=True, model=model())
    assert len(warned) == 1
    assert_same([found[0], *found[1]], [expected[0], *expected[1]])
    assert launched(found[2]) == 0


def hook(optimizer):
    optimizer.lr *= 0.9


def test_hooks_of_the_script_are_not_recorded():
    with pytest.warns(UserWarning, match="the hook 'own' is the script's own code"):
        compare(momentum, batches(10), prepare=lambda o: o.add_hook(hook, "own"))


def test_arrays_in_host_memory_are_not_recorded():
    data = [(x, t, np.ones(2)) for x, t in batches(10)]

    class WithLengths(Model):
        def forward(self, x, t, lengths):
            return super().forward(x, t)

    with pytest.warns(UserWarning, match="an argument of the loss function is a numpy.ndarray"):
        train(momentum(), data, graphs=True, model=WithLengths())


def test_a_model_in_host_memory():
    model = chainer.links.Classifier(chainer.links.Linear(3, 2))
    optimizer = chainer.optimizers.SGD().setup(model)
    optimizer.use_cuda_graphs()
    with pytest.warns(UserWarning, match="no CUDA graphs: the model is not on a GPU"):
        optimizer.update(model, np.ones((4, 3), "f"), np.zeros(4, "i"))


def test_functions_that_the_same_line_makes_again():
    def run(graphs):
        model = Model()
        optimizer = momentum().setup(model)
        if graphs:
            optimizer.use_cuda_graphs()
        for x, t in batches(20):
            optimizer.update(lambda x, t: model(x, t), x, t)
        return {name: np.array(p.array) for name, p in model.namedparams()}, optimizer

    found, optimizer = run(True)
    assert_same([found], [run(False)[0]])
    assert launched(optimizer) >= 14


def test_function_hooks_see_eager_steps():
    class Counting(chainer.FunctionHook):
        n = 0

        def forward_preprocess(self, function, in_data):
            self.n += 1

    model = Model()
    optimizer = momentum().setup(model)
    optimizer.use_cuda_graphs()
    for batch in batches(15):
        optimizer.update(model, *batch)
    n = launched(optimizer)
    with Counting() as counting:
        optimizer.update(model, *batches(1)[0])
    assert counting.n > 3
    assert launched(optimizer) == n
    optimizer.update(model, *batches(1)[0])
    assert launched(optimizer) == n + 1


@pytest.mark.parametrize("at", ["record", "copies"])
def test_out_of_memory(at, monkeypatch):
    original = State.__init__

    def fail(self, *args, **options):
        if at == "record" or "/w1" in args[0]:
            raise MemoryError("out of memory")
        original(self, *args, **options)

    if at == "record":
        monkeypatch.setattr(Stream, "begin_capture", fail)
        message = "no CUDA graphs: MemoryError: out of memory"
    else:
        monkeypatch.setattr(State, "__init__", fail)
        message = "graphs are not compared with eager steps: MemoryError: out of memory"
    with pytest.warns(UserWarning, match=message):
        optimizer = compare(momentum, batches(20))
    assert launched(optimizer) == (0 if at == "record" else 15)


def test_an_error_of_a_launch_reaches_the_script(monkeypatch):
    _, _, optimizer = train(momentum(), batches(10), graphs=True)

    def fail(self, stream):
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(Tape, "launch", fail)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        optimizer.update(optimizer.target, *batches(1)[0])


def test_switched_off(monkeypatch):
    _, _, optimizer = train(momentum(), batches(10), graphs=True)
    optimizer.use_cuda_graphs(False)
    assert optimizer.cuda_graphs is None
    optimizer.update(optimizer.target, *batches(1)[0])
    assert optimizer.t == 11
    monkeypatch.setenv("CHAINER_CUDA_GRAPHS", "1")
    assert optimizer.cuda_graphs is None
    assert momentum().cuda_graphs.are_on


def test_copies_of_an_optimizer_have_what_the_gpu_knows():
    with pytest.warns(UserWarning, match="not finite"):
        _, _, optimizer = train(
            sgd(), half_batches(20, infinite=(15,)), graphs=True, prepare=mixed
        )
        rule = copy.deepcopy(optimizer.target.w1.update_rule)
    assert rule.t == 19
    twin = copy.deepcopy(optimizer)
    assert twin._loss_scale == optimizer._loss_scale
    assert twin.cuda_graphs.n_launched == 0


@pytest.mark.parametrize(("factor", "is_accepted"), [(1 + 2**-23, True), (1.0005, False)])
def test_rounding_is_accepted_and_no_more(factor, is_accepted, monkeypatch):
    original, model = Tape.launch, Model()

    def launch(self, stream):
        original(self, stream)
        model.w1.array[...] *= np.float32(factor)

    monkeypatch.setattr(Tape, "launch", launch)
    with contextlib.nullcontext() if is_accepted else pytest.warns(UserWarning, match="/w1"):
        _, _, optimizer = train(momentum(), batches(10), graphs=True, model=model)
    assert optimizer.cuda_graphs.are_on == is_accepted


def decay_a_rule(k, optimizer):
    rule = optimizer.target.w1.update_rule
    if k == 10:
        rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.3))
    if k == 18:
        rule.remove_hook("WeightDecay")


def exchange_a_hook(k, optimizer):
    if k == 10:
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
    if k == 18:
        optimizer.remove_hook("WeightDecay")
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.7))


def exchange_a_rule(k, optimizer):
    if k == 10:
        rule = optimizer.create_update_rule()
        rule.hyperparam.lr = 0.01
        optimizer.target.w1.update_rule = rule


def give_a_rule_other_parents(k, optimizer):
    if k == 10:
        rule = chainer.optimizers.MomentumSGD(0.01).create_update_rule()
        optimizer.target.w1.update_rule = rule


@pytest.mark.parametrize(
    "between", [decay_a_rule, exchange_a_hook, exchange_a_rule, give_a_rule_other_parents]
)
def test_hooks_and_rules_that_come_and_go(between):
    optimizer = compare(momentum, batches(30), between=between)
    assert launched(optimizer) >= 9


def test_a_hyperparameter_that_chooses_the_kernel():
    def between(k, optimizer):
        if k == 15:
            optimizer.hyperparam.amsgrad = True
            for parameter in optimizer.target.params():
                parameter.update_rule.state["vhat"] = to_gpu(np.zeros(parameter.shape, "f"))

    assert launched(compare(adam, batches(30), between=between)) >= 15


def test_parameters_that_are_frozen_while_steps_overflow():
    def between(k, optimizer):
        if k in (12, 22):
            optimizer.target.b1.update_rule.enabled = k == 22

    with pytest.warns(UserWarning, match="not finite"):
        data = half_batches(34, infinite=(10, 16, 19, 27))
        optimizer = compare(adam, data, prepare=mixed, between=between)
    assert optimizer.target.b1.update_rule.t == 22


class Scaled(Model):
    """A model whose loss depends on a setting, in one of several places."""

    factor = 1.0

    def forward(self, x, t):
        return super().forward(x, t) * self.find_factor()


class WithAttribute(Scaled):
    def find_factor(self):
        return self.factor

    def set_factor(self, value):
        self.factor = np.float32(value)


class WithList(Scaled):
    def __init__(self):
        super().__init__()
        self.factors = [1.0]

    def find_factor(self):
        return self.factors[0]

    def set_factor(self, value):
        self.factors[0] = value


class WithFunction(Scaled):
    def __init__(self):
        super().__init__()
        self.find_factor = lambda: 1.0

    def set_factor(self, value):
        self.find_factor = lambda: value


class WithArray(Scaled):
    def __init__(self):
        super().__init__()
        self.constant = to_gpu(np.ones((), "f"))

    def find_factor(self):
        return self.constant

    def set_factor(self, value):
        self.constant = to_gpu(np.array(value, "f"))


class WithOptions(Scaled):
    class Options:
        factor = 1.0

    def __init__(self):
        super().__init__()
        self.options = self.Options()

    def find_factor(self):
        return self.options.factor

    def set_factor(self, value):
        self.options.factor = value


@pytest.mark.parametrize("kind", [WithAttribute, WithList, WithFunction, WithArray, WithOptions])
def test_attributes_of_a_model_that_a_script_changes(kind):
    def run(graphs):
        model = kind()
        changed = {10: 0.5, 20: 0.25}

        def between(k, optimizer):
            if k in changed:
                model.set_factor(changed[k])

        return train(momentum(), batches(30), graphs=graphs, model=model, between=between)

    expected, (found, _, optimizer) = run(False), run(True)
    assert_same([found], [expected[0]])
    assert launched(optimizer) >= 15


FACTOR = 1.0


def by_global(model, options):
    return lambda x, t: model(x, t) * FACTOR


def by_closure(model, options):
    return lambda x, t: model(x, t) * options["factor"]


def by_method(model, options):
    class Loss:
        def __init__(self):
            self.factor = options["factor"]

        def compute(self, x, t):
            return model(x, t) * self.factor

    return Loss().compute


def by_keyword(model, options):
    def loss(x, t, *, factor=options["factor"]):
        return model(x, t) * factor

    return loss


@pytest.mark.parametrize("make", [by_global, by_closure, by_method, by_keyword])
def test_what_a_loss_function_refers_to(make, monkeypatch):
    def run(graphs):
        model, options = Model(), {"factor": 1.0}
        optimizer = momentum().setup(model)
        if graphs:
            optimizer.use_cuda_graphs()
        loss = make(model, options)
        for k, batch in enumerate(batches(30)):
            if k == 15:
                options["factor"] = 0.5
                monkeypatch.setitem(globals(), "FACTOR", 0.5)
                loss = make(model, options)
            optimizer.update(loss, *batch)
        monkeypatch.setitem(globals(), "FACTOR", 1.0)
        return {name: np.array(p.array) for name, p in model.namedparams()}, optimizer

    expected, (found, optimizer) = run(False), run(True)
    assert_same([found], [expected[0]])
    assert launched(optimizer) >= 15


class DrawsOnTheHost(Model):
    def forward(self, x, t):
        return super().forward(x, t) * (2 if random.random() < 0.1 else 1)


class DrawsFromItsOwn(Model):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x, t):
        return super().forward(x, t) * (2 if self.generator.random() < 0.5 else 1)


class IteratesOverNumbers(Model):
    def __init__(self):
        super().__init__()
        self.numbers = iter(np.random.default_rng(0).random(500).tolist())

    def forward(self, x, t):
        return super().forward(x, t) * next(self.numbers)


class CountsDeeply(Model):
    def __init__(self):
        super().__init__()
        self.counts = {"all": {"steps": 0}}

    def forward(self, x, t):
        self.counts["all"]["steps"] += 1
        return super().forward(x, t) / self.counts["all"]["steps"]


class ChangesArguments(Model):
    def forward(self, x, t):
        x *= 2
        return super().forward(x, t)


class KeepsAList(Model):
    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x, t):
        loss = super().forward(x, t)
        self.losses.append(loss)
        return loss


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (DrawsOnTheHost, "it draws random numbers on the host"),
        (DrawsFromItsOwn, "it draws random numbers on the host"),
        (CountsDeeply, "differed each time"),
        (ChangesArguments, "it changes an argument of the loss function in place"),
        (KeepsAList, "differed each time|it changes the length of a list"),
    ],
)
def test_what_a_model_must_not_do(model, reason):
    def run(graphs):
        random.seed(3)
        made = model()
        data = [(to_gpu(x), to_gpu(t)) for x, t in batches(80)]
        found, _, optimizer = train(momentum(), data, graphs=graphs, model=made)
        return found, len(getattr(made, "losses", ())), optimizer

    expected = run(False)
    with pytest.warns(UserWarning, match=f"no CUDA graphs: .*({reason})"):
        found = run(True)
    assert_same([found[0]], [expected[0]])
    assert found[1] == expected[1]
    assert launched(found[2]) == 0


def test_a_model_that_reads_something_new_in_each_step():
    with pytest.warns(UserWarning, match="a graph gives other values than an eager step for /b1"):
        _, _, optimizer = train(momentum(), batches(10), graphs=True, model=IteratesOverNumbers())
    assert launched(optimizer) == 0


def test_parameters_that_another_optimizer_updates():
    def run(graphs):
        first, second = Model(), Model()
        optimizers = [momentum().setup(each) for each in (first, second)]
        if graphs:
            optimizers[0].use_cuda_graphs()
        for x, t in batches(20):
            second.cleargrads()
            optimizers[0].update(lambda x, t: first(x, t) + second(x, t), x, t)
            optimizers[1].update()
        return {name: np.array(p.array) for name, p in second.namedparams()}

    expected = run(False)
    with pytest.warns(UserWarning, match="depends on parameter .* does not update"):
        assert_same([run(True)], [expected])


def test_steps_that_are_skipped_are_told_in_time():
    data = half_batches(30)
    _, _, optimizer = train(sgd(), data, graphs=True, prepare=mixed)
    data[0][0][...] = np.inf
    with pytest.warns(UserWarning, match="not finite"):
        for _ in range(LAUNCHES_BETWEEN_LOOKS + 1):
            optimizer.update(optimizer.target, *data[0])


def test_an_optimizer_with_methods_of_its_own():
    class Careful(chainer.optimizers.SGD):
        def is_safe_to_update(self):
            return self.t % 2 == 0

    with pytest.warns(UserWarning, match="Careful has a method 'is_safe_to_update' of its own"):
        compare(lambda: Careful(0.1), batches(10))


def test_plain_attributes_and_results_are_those_of_the_step():
    class Notes(Model):
        def forward(self, x, t):
            self.size, self.cache = len(x), None
            return super().forward(x, t)

    model = Notes()
    small, large = batches(40, size=3), batches(40)
    optimizer = momentum().setup(model)
    optimizer.use_cuda_graphs()
    for k in range(40):
        model.cache = 1
        batch = small[k] if k % 5 == 4 else large[k]
        optimizer.update(model, *batch)
        assert (model.size, model.cache) == (len(batch[0]), None)
        assert model.y.shape == (len(batch[0]), 2)
    assert launched(optimizer) >= 25


def test_a_model_in_host_memory_without_its_parameters():
    model = chainer.links.Classifier(chainer.links.Linear(None, 2))
    optimizer = chainer.optimizers.SGD().setup(model)
    optimizer.use_cuda_graphs()
    with pytest.warns(UserWarning, match="no CUDA graphs: the model is not on a GPU"):
        for _ in range(2):
            optimizer.update(model, np.ones((4, 3), "f"), np.zeros(4, "i"))


# ---- channels last ----


@pytest.fixture
def channels_last(stand_in, fuse, monkeypatch):
    """Normalize channels-last images by the stand-in for cuDNN; return the names of kernels."""
    cudnn = stand_in("cudnn")
    library = stand_in("functions").Functions(cudnn)
    launched = []

    def recordable(name):
        function = getattr(library, name)

        def enqueue(*args):
            do(lambda: launched.append(name) or function(*args))
            return 0

        enqueue.argtypes = None
        return enqueue

    for name in ("cudnnBatchNormalizationForwardTrainingEx", "cudnnBatchNormalizationBackwardEx"):
        monkeypatch.setattr(library, name, recordable(name))

    def allocate(size):
        array = XP.empty(max(size, 1), np.uint8)
        return SimpleNamespace(ptr=array.ctypes.data, array=array)

    gpu = stand_in("host_gpu").HostGpu()
    monkeypatch.setattr(gpu, "empty", XP.empty)
    monkeypatch.setattr(gpu, "allocate", allocate)
    monkeypatch.setattr(gpu, "copy", lambda array: array.copy())
    monkeypatch.setattr(ReLUGrad2, "forward_gpu", ReLUGrad2.forward_cpu)
    fuse(cudnn, library, gpu, "forward_gpu")
    with chainer.using_config("compute_mode", MODE):
        yield launched


class Residual(chainer.Chain):
    """Two normalizations, one of them added to the images."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.one, self.two = L.BatchNormalization(8), L.BatchNormalization(8)
        self.to_device(Gpu())

    def forward(self, x, t):
        h = self.two(F.relu(self.one(x)))
        self.look(h)
        y = F.relu(h + x)
        loss = F.sum(F.square(F.cast(y, np.float32) - t)) / t.size
        chainer.report({"loss": loss}, self)
        self.y = y
        return loss

    def look(self, h):
        pass


class Looking(Residual):
    def look(self, h):
        chainer.report({"sum": h.array.astype(np.float32).sum()}, self)


def images(n):
    random = np.random.default_rng(0)
    return [
        (
            as_shaped(to_gpu(random.normal(size=(2, 3, 4, 8)).astype(np.float16))),
            to_gpu(random.normal(size=(2, 8, 3, 4)).astype(np.float32)),
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize("kind, n_fused", [(Residual, 2), (Looking, 1)])
def test_a_graph_normalizes_with_what_follows(kind, n_fused, channels_last):
    data = images(12)
    expected, wanted, _ = train(chainer.optimizers.SGD(0.1), data, graphs=False, model=kind())
    n_eager = len(channels_last)
    parameters, reported, optimizer = train(
        chainer.optimizers.SGD(0.1), data, graphs=True, model=kind()
    )
    graphs = optimizer.cuda_graphs
    assert graphs.n_launched > 5
    assert graphs.n_fused == n_fused
    assert len(channels_last) > n_eager
    for name, value in expected.items():
        np.testing.assert_allclose(parameters[name], value, rtol=0, atol=1e-2)
    for ours, theirs in zip(reported, wanted, strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-2, atol=2e-2)


def test_a_step_that_raises_leaves_nothing_behind(channels_last):
    errors = [None, None, OSError("no data")]

    class Raising(Residual):
        def look(self, h):
            if errors and (error := errors.pop(0)):
                raise error

    model = Raising()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    optimizer.use_cuda_graphs()
    for k, batch in enumerate(images(7)):
        with pytest.raises(OSError) if k == 2 else contextlib.nullcontext():
            optimizer.update(model, *batch)
        assert not chainer.get_function_hooks()
    assert optimizer.cuda_graphs.n_fused == 2
