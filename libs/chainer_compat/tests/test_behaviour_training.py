"""Links, optimizers, serializers, iterators, reporters and the training loop on this stack."""

import io
import json
import sys
from itertools import chain

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

LINKS = {
    "Linear": (lambda: L.Linear(None, 3), (2, 4), (2, 3)),
    "Convolution2D": (lambda: L.Convolution2D(3, 4, 3, pad=1), (2, 3, 5, 5), (2, 4, 5, 5)),
    "ConvolutionND": (lambda: L.ConvolutionND(1, 3, 4, 3), (2, 3, 5), (2, 4, 3)),
    "Deconvolution2D": (lambda: L.Deconvolution2D(3, 4, 2), (2, 3, 5, 5), (2, 4, 6, 6)),
    "DepthwiseConvolution2D": (
        lambda: L.DepthwiseConvolution2D(3, 2, 3), (2, 3, 5, 5), (2, 6, 3, 3)
    ),
    "DilatedConvolution2D": (
        lambda: L.DilatedConvolution2D(3, 4, 3, dilate=2), (2, 3, 7, 7), (2, 4, 3, 3)
    ),
    "BatchNormalization": (lambda: L.BatchNormalization(4), (5, 4), (5, 4)),
    "BatchRenormalization": (lambda: L.BatchRenormalization(4), (5, 4), (5, 4)),
    "LayerNormalization": (lambda: L.LayerNormalization(), (5, 4), (5, 4)),
    "GroupNormalization": (lambda: L.GroupNormalization(2), (2, 4, 3), (2, 4, 3)),
    "LSTM": (lambda: L.LSTM(4, 3), (2, 4), (2, 3)),
    "StatefulGRU": (lambda: L.StatefulGRU(4, 3), (2, 4), (2, 3)),
    "Maxout": (lambda: L.Maxout(4, 3, 2), (2, 4), (2, 3)),
    "PReLU": (lambda: L.PReLU((4,)), (2, 4), (2, 4)),
    "Highway": (lambda: L.Highway(4), (2, 4), (2, 4)),
    "Inception": (
        lambda: L.Inception(3, 2, 2, 2, 2, 2, 2), (2, 3, 5, 5), (2, 8, 5, 5)
    ),
    "Scale": (lambda: L.Scale(1, (4,)), (2, 4), (2, 4)),
    "MLPConvolution2D": (lambda: L.MLPConvolution2D(3, (4, 2), 3), (2, 3, 5, 5), (2, 2, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_link(name):
    make, shape, expected = LINKS[name]
    x = chainer.Variable(np.random.RandomState(0).rand(*shape).astype(np.float32))
    y = make()(x)
    F.sum(y * y).backward()
    assert (y.shape, y.dtype) == (expected, np.float32)
    assert (x.grad.shape, x.grad.dtype) == (shape, np.float32)
    assert np.isfinite(x.grad).all()


@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize("name", ["NStepLSTM", "NStepGRU", "NStepBiLSTM", "NStepRNNTanh"])
def test_recurrent_link(name, n_layers):
    link = getattr(L, name)(n_layers, 3, 4, 0.0)
    xs = [np.ones((length, 3), np.float32) for length in (4, 2)]
    states = (None, None) if "LSTM" in name else (None,)
    *_, ys = link(*states, xs)
    assert [y.shape for y in ys] == [(4, 8 if "Bi" in name else 4), (2, 8 if "Bi" in name else 4)]
    F.sum(F.concat(ys, 0)).backward()


@pytest.mark.parametrize("link", [L.NegativeSampling, L.BlackOut], ids=["negative", "blackout"])
def test_sampling_losses(link):
    loss = link(3, [5, 3, 2, 4], 2)
    x = chainer.Variable(np.ones((4, 3), np.float32))
    y = loss(x, np.array([0, 1, 2, 3], np.int32))
    y.backward()
    assert y.dtype == x.grad.dtype == np.float32


def test_hierarchical_softmax_and_crf_and_ctc():
    t = np.array([0, 2], np.int32)
    x = np.ones((2, 3), np.float32)
    tree = L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 3, 1: 2, 2: 4})
    assert L.BinaryHierarchicalSoftmax(3, tree)(x, t).shape == ()
    assert L.CRF1d(3)([x, x], [t, t]).shape == ()
    loss = F.connectionist_temporal_classification([x, x, x], np.array([[1], [2]], np.int32), 0)
    assert np.isfinite(loss.array)


def test_an_initializer_gives_the_scale_asked_for():
    w = L.Linear(400, 300, initialW=chainer.initializers.LeCunNormal(np.float64(2))).W.array
    assert w.dtype == np.float32
    assert abs(w.std() - 2 / 20) < 2e-3
    orthogonal = chainer.initializers.generate_array(
        chainer.initializers.Orthogonal(1), (4, 6), np, dtype=np.float32
    )
    np.testing.assert_allclose(orthogonal @ orthogonal.T, np.eye(4), atol=1e-5)


# One step from a parameter of 1 with a gradient of 0.5.
STEPS = {
    "SGD": ({"lr": 0.1}, 1 - 0.1 * 0.5),
    "MomentumSGD": ({"lr": 0.1}, 1 - 0.1 * 0.5),
    "NesterovAG": ({"lr": 0.1, "momentum": 0.9}, 1 - (0.81 + 1.9) * 0.1 * 0.5),
    "CorrectedMomentumSGD": ({"lr": 0.1}, 1 - 0.1 * 0.5),
    "AdaGrad": ({"lr": 0.1}, 1 - 0.1),
    "RMSprop": ({"lr": 0.1, "alpha": 0.9}, 1 - 0.1 / np.sqrt(0.1)),
    "Adam": ({"alpha": 0.1}, 1 - 0.1),
    "AMSGrad": ({"alpha": 0.1}, 1 - 0.1),
    "AdamW": ({"alpha": 0.1, "weight_decay_rate": 0.01}, 1 - 0.1 - 0.01),
    "SMORMS3": ({"lr": 0.1}, 1 - 0.1 / np.sqrt(0.5)),
    "AdaDelta": ({"rho": 0.9, "eps": 1e-2}, 1 - 0.5 * 0.1 / np.sqrt(0.1 * 0.25 + 0.01)),
}


@pytest.mark.parametrize("number", [float, np.float64, np.float32], ids=lambda n: n.__name__)
@pytest.mark.parametrize("name", STEPS)
def test_optimizer_step(name, number):
    arguments, expected = STEPS[name]
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(np.ones(3, np.float32))
    optimizer = getattr(chainer.optimizers, name)()
    for key, value in arguments.items():
        setattr(optimizer.hyperparam, key, number(value))
    optimizer.setup(link)
    link.p.grad = np.full(3, 0.5, np.float32)
    optimizer.update()
    np.testing.assert_allclose(link.p.array, expected, rtol=1e-5)
    states = link.p.update_rule.state or {}
    assert {link.p.dtype, *(state.dtype for state in states.values())} == {np.dtype("f")}


HOOKS = {
    "WeightDecay": (0.1, 0.5 + 0.1),
    "Lasso": (0.1, 0.5 + 0.1),
    "GradientClipping": (0.1, 0.1 / np.sqrt(3)),
    "GradientHardClipping": ((-0.2, 0.2), 0.2),
    "GradientLARS": (0.1, 0.5 * np.sqrt(3) / (1e-9 + np.sqrt(0.75))),
}


@pytest.mark.parametrize("name", HOOKS)
def test_optimizer_hook(name):
    arguments, expected = HOOKS[name]
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(np.ones(3, np.float32))
    optimizer = chainer.optimizers.SGD(lr=1).setup(link)
    optimizer.add_hook(getattr(chainer.optimizer_hooks, name)(*np.atleast_1d(arguments)))
    link.p.grad = np.full(3, 0.5, np.float32)
    optimizer.update()
    np.testing.assert_allclose(1 - link.p.array, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_serializers(kind, tmp_path):
    def make():
        model = chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4), L.Linear(4, 2))
        return model, chainer.optimizers.Adam().setup(model)

    model, optimizer = make()
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(np.eye(3, dtype=np.float32)) ** 2))
    save, load = (getattr(chainer.serializers, f"{verb}_{kind}") for verb in ("save", "load"))
    save(str(tmp_path / "model"), model)
    save(str(tmp_path / "optimizer"), optimizer)
    again, other = make()
    load(str(tmp_path / "model"), again)
    load(str(tmp_path / "optimizer"), other)
    for old, new in zip(model.params(), again.params(), strict=True):
        assert (old.array == new.array).all()
        assert (old.update_rule.state["m"] == new.update_rule.state["m"]).all()
    assert (again[1].avg_mean == model[1].avg_mean).all()
    assert other.t == optimizer.t == 2


ITERATORS = {
    "serial": lambda data, **options: chainer.iterators.SerialIterator(data, 4, **options),
    "threads": lambda data, **options: chainer.iterators.MultithreadIterator(
        data, 4, n_threads=2, **options
    ),
    "processes": lambda data, **options: chainer.iterators.MultiprocessIterator(
        data, 4, n_processes=1, **options
    ),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ITERATORS)
def test_iterators(kind):
    data = [(np.full(2, i, np.float32), np.int32(i)) for i in range(10)]
    iterator = ITERATORS[kind](data, shuffle=False)
    try:
        batches = [[int(t) for _, t in next(iterator)] for _ in range(3)]
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
        assert (iterator.epoch, iterator.is_new_epoch) == (1, True)
        assert iterator.epoch_detail == 1.2
    finally:
        iterator.finalize()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_are_replaced_after_some_tasks():
    iterator = chainer.iterators.MultiprocessIterator(
        list(range(8)), 4, shuffle=False, n_processes=2, shared_mem=0, maxtasksperchild=1
    )
    try:
        assert [next(iterator)[0] for _ in range(4)] == [0, 4, 0, 4]
    finally:
        iterator.finalize()


class BeingReplaced(list):
    """A pool's workers at a time when all have ended and new ones have not started."""

    def __len__(self):
        return 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_are_all_replaced_at_the_same_time():
    iterator = chainer.iterators.MultiprocessIterator(
        list(range(8)), 4, shuffle=False, n_processes=2, shared_mem=0
    )
    try:
        assert next(iterator)[0] == 0
        pool = iterator._prefetch_loop._pool
        pool._pool = BeingReplaced(pool._pool)
        assert [next(iterator)[0] for _ in range(4)] == [4, 0, 4, 0]
    finally:
        iterator.finalize()


# When one is killed, workers either wait for work or are at work, and stay so.
KILLED = """
import multiprocessing, os, signal
from chainer.iterators import MultiprocessIterator

class Examples:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if {is_busy} and index >= 4:
            signal.pause()
        return index

if __name__ == "__main__":
    iterator = MultiprocessIterator(
        Examples(), 4, shuffle=False, n_processes=2, shared_mem=0
    )
    print(*next(iterator))
    worker = multiprocessing.active_children()[0].pid
    os.kill(worker, signal.SIGKILL)
    try:
        while True:
            next(iterator)
    except RuntimeError as error:
        assert f"(process {{worker}}) was killed by SIGKILL" in str(error), error
    try:
        next(iterator)
    except RuntimeError:
        print("raised twice")
    {end}
"""


@pytest.mark.parametrize("end", ["iterator.finalize()", "pass"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_worker_that_is_killed_is_named(is_busy, end, tmp_path, execute):
    script = tmp_path / "script.py"
    script.write_text(KILLED.format(is_busy=is_busy, end=end))
    ended = execute(sys.executable, script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["0 1 2 3", "raised twice"]


def test_shuffled_iterator_sees_everything_once():
    iterator = chainer.iterators.SerialIterator(list(range(10)), 4, repeat=False)
    assert sorted(chain.from_iterable(iterator)) == list(range(10))


def test_converter():
    batch = [(np.full((2,), i, np.float32), i) for i in range(3)]
    x, t = chainer.dataset.concat_examples(batch)
    assert (x.shape, x.dtype, t.tolist()) == ((3, 2), np.float32, [0, 1, 2])
    columns = chainer.dataset.concat_examples([{"a": 1.5}, {"a": 2.5}])
    assert columns["a"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64])
def test_summary(dtype):
    values = (np.random.RandomState(0).rand(5000) * 100).astype(dtype)
    summary = chainer.reporter.Summary()
    for value in values:
        summary.add(value)
    mean, std = summary.make_statistics()
    np.testing.assert_allclose(mean, values.astype("d").mean(), rtol=1e-12)
    np.testing.assert_allclose(std, values.astype("d").std(), rtol=1e-9)


def test_summary_with_weights_and_variables():
    summary = chainer.reporter.DictSummary()
    for value, weight in ((1, 3), (5, 1)):
        variable = chainer.Variable(np.array(value, np.float16))
        summary.add({"x": (variable, np.float32(weight)), "y": 2.0})
    assert summary.compute_mean() == {"x": 2, "y": 2}


def test_summary_survives_a_snapshot(tmp_path):
    summary = chainer.reporter.DictSummary()
    summary.add({"x": np.float16(2)})
    chainer.serializers.save_npz(str(tmp_path / "summary"), summary)
    again = chainer.reporter.DictSummary()
    chainer.serializers.load_npz(str(tmp_path / "summary"), again)
    again.add({"x": np.float16(4)})
    assert again.compute_mean() == {"x": 3}


def make_trainer(folder, epochs):
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (60, 2)).astype(np.float32)
    data = chainer.datasets.TupleDataset(x, (x[:, 0] > x[:, 1]).astype(np.int32))
    train, test = chainer.datasets.split_dataset(data, 40)
    np.random.seed(0)
    model = L.Classifier(chainer.Sequential(L.Linear(2, 8), F.tanh, L.Linear(8, 2)))
    optimizer = chainer.optimizers.Adam(alpha=0.05).setup(model)
    iterator = chainer.iterators.SerialIterator(train, 10, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), str(folder))
    validation = chainer.iterators.SerialIterator(test, 10, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(validation, model))
    trainer.extend(extensions.LogReport(filename="log"))
    trainer.extend(extensions.ExponentialShift("alpha", np.float64(0.9)))
    trainer.extend(extensions.snapshot(filename="snapshot"))
    trainer.extend(extensions.PrintReport(["epoch", "main/loss"], out=io.StringIO()))
    return trainer, model


def test_training_loop_with_snapshot(tmp_path):
    trainer, model = make_trainer(tmp_path / "a", 6)
    trainer.run()
    log = json.loads((tmp_path / "a" / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["main/loss"] < 0.7 * log[0]["main/loss"]
    assert log[-1]["validation/main/accuracy"] > 0.8
    assert all(isinstance(entry["main/loss"], float) for entry in log)

    half, _ = make_trainer(tmp_path / "b", 3)
    half.run()
    rest, resumed = make_trainer(tmp_path / "b", 6)
    chainer.serializers.load_npz(str(tmp_path / "b" / "snapshot"), rest)
    rest.run()
    for one, other in zip(model.params(), resumed.params(), strict=True):
        assert (one.array == other.array).all()
    assert (
        json.loads((tmp_path / "b" / "log").read_text())[-1]["main/loss"] == (log[-1]["main/loss"])
    )


@pytest.mark.parametrize(
    ("name", "parameters", "value", "expected"),
    [
        ("Normal", {"loc": 1, "scale": 2}, 2, -0.125 - np.log(2 * np.sqrt(2 * np.pi))),
        ("Uniform", {"low": 0, "high": 4}, 1, -np.log(4)),
        ("Exponential", {"lam": 2}, 1, np.log(2) - 2),
        ("Laplace", {"loc": 0, "scale": 1}, 1, -np.log(2) - 1),
        ("Gamma", {"k": 2, "theta": 1}, 1, -1),
        ("Beta", {"a": 2, "b": 1}, 0.5, 0),
        ("Poisson", {"lam": 2}, 1, np.log(2) - 2),
        ("Bernoulli", {"p": 0.25}, 1, np.log(0.25)),
        ("Pareto", {"scale": 1, "alpha": 2}, 2, np.log(2 / 8)),
        ("LogNormal", {"mu": 0, "sigma": 1}, 1, -np.log(np.sqrt(2 * np.pi))),
        ("Cauchy", {"loc": 0, "scale": 1}, 0, -np.log(np.pi)),
        ("Gumbel", {"loc": 0, "scale": 1}, 0, -1),
        ("Geometric", {"p": 0.25}, 2, np.log(0.75 * 0.25)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_log_probability(name, parameters, value, expected):
    parameters = {key: np.array(number, np.float32) for key, number in parameters.items()}
    distribution = getattr(chainer.distributions, name)(**parameters)
    value = np.array(value, np.int32 if name in {"Poisson", "Geometric"} else np.float32)
    log_prob = distribution.log_prob(value)
    np.testing.assert_allclose(log_prob.array, expected, rtol=1e-5, atol=1e-5)
    assert distribution.sample(7).shape == (7,)


@pytest.mark.parametrize(
    "model",
    [pytest.param(L.VGG16Layers, marks=pytest.mark.nightly), L.ResNet50Layers],
    ids=["VGG16", "ResNet50"],
)
def test_vision_models_can_be_made(model, monkeypatch):
    # VGG16 would draw 138 million numbers.
    monkeypatch.setattr(chainer.initializers.Normal, "__call__", lambda self, array: None)
    assert len(list(model(pretrained_model=None).params())) > 20


def test_links_can_be_copied_and_pickled():
    import copy
    import pickle

    link = L.Linear(2, 3)
    for again in (copy.deepcopy(link), pickle.loads(pickle.dumps(link)), link.copy("init")):
        assert again.W.shape == (3, 2)
        assert again.W is not link.W


def test_text_of_the_runtime():
    text = io.StringIO()
    chainer.print_runtime_info(text)
    assert "Chainer: 7.8.1" in text.getvalue()
    assert np.__version__ in text.getvalue()


def test_computational_graph_and_hooks():
    x = chainer.Variable(np.ones((2, 2), np.float32), name="x")
    with chainer.function_hooks.TimerHook() as timer:
        y = F.relu(x) * 2
    assert set(timer.summary()) == {"ReLU", "MulConstant"}
    assert "ReLU" in chainer.computational_graph.build_computational_graph([y]).dump()
