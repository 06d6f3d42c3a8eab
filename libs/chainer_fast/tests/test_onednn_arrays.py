"""``mdarray``: a NumPy array to everything except oneDNN."""

import copy
import pickle

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers, serializers
from chainer.backends import intel64

from chainer_fast.onednn import library

pytestmark = pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(params=[16, 32, 5], ids="{} channels".format)
def blocks(request):
    """Return an array that a convolution has left in oneDNN's layout, and the same in NumPy's."""
    channels = request.param
    x = numbers(2, channels, 3, 4)
    w = np.eye(channels, dtype=np.float32)[:, :, None, None]
    array = F.convolution_2d(x, w).array
    assert isinstance(array, intel64.mdarray) and array.is_in_blocks
    return array, x


def test_it_says_what_it_is_without_leaving_its_layout(blocks):
    array, x = blocks
    assert (array.shape, array.ndim, array.size) == (x.shape, 4, x.size)
    assert array.dtype == np.float32
    assert isinstance(array, chainer.get_array_types())
    assert isinstance(array, chainer.get_cpu_array_types())
    assert chainer.backend.get_array_module(array) is np
    assert chainer.backend.get_device_from_array(array).name == "@intel64"
    assert array.is_in_blocks


def test_whoever_looks_gets_one_and_the_same_numpy_array(blocks):
    array, x = blocks
    seen = np.asarray(array)
    np.testing.assert_array_equal(seen, x)
    assert not array.is_in_blocks
    seen += 1
    assert np.asarray(array) is seen
    np.testing.assert_array_equal(np.asarray(F.relu(array).array), np.maximum(x + 1, 0))


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a[1, 2:],
        lambda a: a.reshape(2, -1),
        lambda a: a.transpose(1, 0, 2, 3),
        lambda a: a.T,
        lambda a: a.ravel(),
        lambda a: a.mean(axis=(0, 2)),
        lambda a: a.max(),
        lambda a: a.argmax(axis=1),
        lambda a: a.tolist(),
        lambda a: len(a),
        lambda a: list(a)[1],
        lambda a: a.flags.c_contiguous,
        lambda a: np.asarray(a, np.float64),
        lambda a: np.array(a),
        lambda a: np.concatenate([a, a]),
        lambda a: np.add.reduce(a, axis=1),
        lambda a: np.isnan(a),
        lambda a: np.divmod(a, 2),
        lambda a: a.astype(np.float64),
        lambda a: a.sum(),
        lambda a: a.sum(axis=1),
        lambda a: a.sum(axis=(0, 2, 3), keepdims=True),
        lambda a: a.sum(axis=(0, 2, 3), dtype=np.float64),
        lambda a: -a,
        lambda a: abs(a),
        lambda a: a + 1,
        lambda a: 1 - a,
        lambda a: a > 0,
        lambda a: a * np.float64(2),
        lambda a: a * np.arange(4.0),
        lambda a: a * np.arange(a.shape[1], dtype="f")[:, None, None],
        lambda a: a + np.ones((2, 1, 3, 4), "f"),
        lambda a: a * np.ones((2, *a.shape), "f"),
        lambda a: np.ones_like(np.asarray(a.copy())) * a,
        lambda a: np.maximum(a, 0),
        lambda a: np.exp(a, dtype=np.float64),
        lambda a: np.where(np.asarray(a) > 0, a, 0),
        lambda a: a**2,
        lambda a: (a == a).all(),
        lambda a: a @ np.ones((4, 2), "f"),
        lambda a: np.add(a, [1, 2, 3, 4]),
    ],
    ids=range(41),
)
def test_it_computes_as_numpy_does(look, blocks):
    array, x = blocks
    found, expected = look(array), look(x)
    if not isinstance(expected, tuple | list):
        expected = np.asarray(expected)
        assert np.asarray(found).dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [(0, 2, 3), (3, 0, 2), (2, 3)], ids=str)
def test_sums_leave_it_in_its_layout(axis, blocks):
    array, x = blocks
    found = array.sum(axis=axis)
    assert type(found) is np.ndarray and array.is_in_blocks
    np.testing.assert_allclose(found, x.sum(axis=axis, dtype="d"), rtol=1e-5, atol=1e-5)


def test_functions_of_elements_leave_it_in_its_layout():
    x = numbers(2, 16, 3, 3)
    a, b = (F.convolution_2d(x, np.eye(16, dtype="f")[:, :, None, None]).array for _ in "ab")
    total = np.tanh(a + b * 2)
    a += b
    a *= 3
    assert a.is_in_blocks and b.is_in_blocks and total.is_in_blocks
    np.testing.assert_allclose(np.asarray(total), np.tanh(3 * x), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(a), 6 * x, rtol=1e-6)


@pytest.mark.parametrize("out", ["blocks", "looked at", "numpy"])
def test_results_go_where_they_are_wanted(out, blocks):
    array, x = blocks
    target = array.copy()
    if out != "blocks":
        target = np.asarray(target) if out == "numpy" else target
        np.asarray(target)
    assert np.multiply(array, 2, out=target) is target
    np.testing.assert_array_equal(np.asarray(target), 2 * x)
    np.testing.assert_array_equal(np.asarray(array), x)


def test_it_can_be_written_to(blocks):
    array, x = blocks
    array[0] = 7
    array[1, 1] = array[0, 0]
    x[0], x[1, 1] = 7, 7
    np.testing.assert_array_equal(np.asarray(array), x)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda a: a.copy()])
def test_copies(again, blocks):
    array, x = blocks
    other = again(array)
    assert isinstance(other, intel64.mdarray)
    if again is not copy.copy:
        other += 1
    np.testing.assert_array_equal(np.asarray(array), x)


def test_pickling(blocks):
    array, x = blocks
    found = pickle.loads(pickle.dumps(array))
    assert isinstance(found, intel64.mdarray)
    np.testing.assert_array_equal(np.asarray(found), x)


def test_a_copy_can_be_forbidden(blocks):
    array, _ = blocks
    assert np.asarray(array, copy=False) is np.asarray(array)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(array, np.float64, copy=False)


def test_astype_without_a_copy_is_the_same_array(blocks):
    array, _ = blocks
    assert array.astype(np.float32, copy=False) is array
    assert array.astype("f").is_in_blocks and array.astype("f") is not array


def test_names_it_has_not():
    array = intel64.ideep.array(numbers(2, 2))
    with pytest.raises(AttributeError, match="nothing"):
        array.nothing  # noqa: B018
    with pytest.raises(TypeError, match="only"):
        float(array)
    assert "mdarray" in repr(array) and bool(intel64.ideep.array(numbers(1, 1)))
    assert int(intel64.ideep.array(np.full((1, 1), 3, "f"))[0, 0]) == 3


def model():
    return chainer.Sequential(
        L.Convolution2D(3, 16, 3, pad=1),
        L.BatchNormalization(16),
        F.relu,
        lambda x: F.average_pooling_2d(x, x.shape[2:]),
        L.Linear(16, 5),
    )


def copied(to_intel64):
    np.random.seed(0)
    made = model()
    if to_intel64:
        made.to_device("@intel64")
    return made


def test_to_intel64_and_back():
    there = copied(True)
    assert {type(p.array) for p in there.params()} == {intel64.mdarray}
    assert {p.device.name for p in there.params()} == {"@intel64"}
    assert {type(p.grad) for p in there.params()} == {intel64.mdarray}
    there.to_device("@numpy")
    for p, q in zip(there.params(), copied(False).params(), strict=True):
        assert type(p.array) is np.ndarray and p.device.name == "@numpy"
        np.testing.assert_array_equal(p.array, q.array)


def test_to_intel64_does_not_share_what_it_was_given():
    array = numbers(3, 3)
    variable = chainer.Variable(array)
    variable.to_intel64()
    variable.array += 1
    np.testing.assert_array_equal(array, numbers(3, 3))


def test_lazy_parameters_are_made_there():
    link = L.Linear(None, 3)
    with pytest.warns(DeprecationWarning, match="to_device"):
        link.to_intel64()
    link(numbers(2, 4))
    assert isinstance(link.W.array, intel64.mdarray) and link.W.shape == (3, 4)


@pytest.mark.parametrize(
    "dtype, shape", [("d", (2, 3)), ("e", (2, 3)), ("f", (2, 3, 4)), ("f", (0, 2))]
)
def test_arrays_that_it_cannot_have_stay_as_they_are(dtype, shape):
    variable = chainer.Variable(np.zeros(shape, dtype))
    variable.to_intel64()
    assert type(variable.array) is np.ndarray


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "MomentumSGD": lambda: optimizers.MomentumSGD(0.1),
    "CorrectedMomentumSGD": lambda: optimizers.CorrectedMomentumSGD(0.1),
    "NesterovAG": lambda: optimizers.NesterovAG(0.1),
    "Adam": optimizers.Adam,
    "AMSGrad": lambda: optimizers.Adam(amsgrad=True),
    "AdamW": lambda: optimizers.Adam(weight_decay_rate=0.1),
    "AdaBound": lambda: optimizers.Adam(adabound=True, final_lr=0.1),
    "RMSprop": optimizers.RMSprop,
    "AdaGrad": optimizers.AdaGrad,
    "AdaDelta": optimizers.AdaDelta,
}
HOOKS = [
    chainer.optimizer_hooks.WeightDecay(0.1),
    chainer.optimizer_hooks.Lasso(0.1),
    chainer.optimizer_hooks.GradientClipping(0.5),
    chainer.optimizer_hooks.GradientHardClipping(-0.2, 0.2),
    chainer.optimizer_hooks.GradientNoise(0.0),
]


def trained(to_intel64, make_optimizer, hooks=()):
    made = copied(to_intel64)
    optimizer = make_optimizer().setup(made)
    for hook in hooks:
        optimizer.add_hook(hook)
    t = np.arange(4, dtype=np.int32)
    for seed in range(3):
        optimizer.update(
            lambda x: F.softmax_cross_entropy(made(x), t), numbers(4, 3, 6, 6, seed=seed)
        )
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    expected = trained(False, OPTIMIZERS[name])
    found = trained(True, OPTIMIZERS[name])
    for p, q in zip(found.params(), expected.params(), strict=True):
        assert isinstance(p.array, intel64.mdarray)
        np.testing.assert_allclose(np.asarray(p.array), q.array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: type(hook).__name__)
def test_optimizer_hooks(hook):
    expected = trained(False, OPTIMIZERS["SGD"], [hook])
    found = trained(True, OPTIMIZERS["SGD"], [hook])
    for p, q in zip(found.params(), expected.params(), strict=True):
        np.testing.assert_allclose(np.asarray(p.array), q.array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_serializers(kind, tmp_path):
    save, load = getattr(serializers, f"save_{kind}"), getattr(serializers, f"load_{kind}")
    found = trained(True, OPTIMIZERS["Adam"])
    optimizer = optimizers.Adam().setup(found)
    save(tmp_path / f"model.{kind}", found)
    for there in (True, False):
        other = model()
        if there:
            other.to_device("@intel64")
        load(tmp_path / f"model.{kind}", other)
        for p, q in zip(other.params(), found.params(), strict=True):
            assert isinstance(p.array, intel64.mdarray) == there
            np.testing.assert_array_equal(np.asarray(p.array), np.asarray(q.array))
    optimizer.update(lambda: F.sum(found(numbers(2, 3, 4, 4))))
    save(tmp_path / f"optimizer.{kind}", optimizer)
    other = copied(True)
    resumed = optimizers.Adam().setup(other)
    resumed.update(lambda: F.sum(other(numbers(2, 3, 4, 4))))
    load(tmp_path / f"optimizer.{kind}", resumed)
    for p, q in zip(other.params(), found.params(), strict=True):
        m, expected = p.update_rule.state["m"], q.update_rule.state["m"]
        np.testing.assert_array_equal(np.asarray(m), np.asarray(expected))


def test_copyto():
    source = numbers(2, 3)
    target = intel64.ideep.array(np.zeros((2, 3), "f"))
    chainer.backend.copyto(target, source)
    np.testing.assert_array_equal(np.asarray(target), source)
    back = np.zeros((2, 3), "f")
    chainer.backend.copyto(back, target)
    np.testing.assert_array_equal(back, source)
