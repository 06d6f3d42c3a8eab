"""A number of NumPy's counts as a plain one in every function and link, as it did with NumPy 1."""

import inspect

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest


def values(*shape):
    """Return numbers that float16 holds exactly, some of them negative."""
    return (np.arange(np.prod(shape)) % 7 - 2.75).reshape(shape) / 4


MATRIX, VECTOR, IMAGE = values(3, 4), values(4), values(2, 4, 5, 5)
POSITIVE, VARIANCE = np.abs(MATRIX) + 0.25, np.abs(VECTOR) + 0.25
LABELS = np.array([2, 0, 3], np.int32)
NO, ONE = np.zeros, np.ones


def average(dtype):
    return {"running_mean": NO(4, dtype), "running_var": ONE(4, dtype)}


def on_box(pool, *others):
    box = np.array([[0, 0, 4, 4]])
    return lambda n, x: pool(x, box.astype(x.dtype), NO(1, np.int32), 2, n, *others)


def recurrent(function, n_matrices, n_states):
    """Return two layers with a dropout between them."""

    def apply(n, x):
        weights = [[values(4, 4).astype(x.dtype)] * n_matrices] * 2
        biases = [[VECTOR.astype(x.dtype)] * n_matrices] * 2
        states = [NO((2, 3, 4), x.dtype)] * n_states
        return function(2, n, *states, weights, biases, [x])[-1][0]

    return apply


def of(function, *arrays):
    return function, arrays


#: name: (function of a number and variables, arrays), where a name ends at the first space.
FUNCTIONS = {
    **{
        f"{name} a number": of(lambda n, x, name=name: getattr(x, f"__{name}__")(n), POSITIVE)
        for name in [
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "pow",
            "radd",
            "rsub",
            "rmul",
            "rtruediv",
            "rpow",
        ]
    },
    "add": of(lambda n, x: n + x, MATRIX),
    "batch_normalization eps": of(
        lambda n, *xs: F.batch_normalization(*xs, eps=n), IMAGE, VECTOR, VECTOR
    ),
    "batch_normalization": of(
        lambda n, *xs: F.batch_normalization(*xs, decay=n, **average(xs[0].dtype)),
        MATRIX,
        VECTOR,
        VECTOR,
    ),
    "batch_renormalization": of(
        lambda n, *xs: F.batch_renormalization(*xs, n, n, n, decay=n, **average(xs[0].dtype)),
        MATRIX,
        VECTOR,
        VECTOR,
    ),
    "clip": of(lambda n, x: F.clip(x, -n, n), MATRIX),
    "contrastive": of(lambda n, *xs: F.contrastive(*xs, LABELS % 2, n), MATRIX, POSITIVE),
    "decorrelated_batch_normalization": of(
        lambda n, x: F.decorrelated_batch_normalization(x, groups=2, eps=n, decay=n),
        values(6, 4) ** 2,
    ),
    "discriminative_margin_based_clustering_loss": of(
        lambda n, x: sum(
            F.discriminative_margin_based_clustering_loss(
                x, np.arange(32).reshape(2, 4, 4) % 2 + 1, n, n, 2, 1, n, n, n
            )
        ),
        values(2, 2, 4, 4),
    ),
    "dropout": of(lambda n, x: F.dropout(x, n), MATRIX),
    "elu": of(lambda n, x: F.elu(x, n), MATRIX),
    "fixed_batch_normalization": of(
        lambda n, *xs: F.fixed_batch_normalization(*xs, eps=n),
        MATRIX,
        VECTOR,
        VECTOR,
        VECTOR,
        VARIANCE,
    ),
    "group_normalization": of(
        lambda n, x, *xs: F.group_normalization(x, 2, *xs, n), IMAGE, VECTOR, VECTOR
    ),
    "gumbel_softmax": of(lambda n, x: F.gumbel_softmax(x, n), MATRIX),
    "huber_loss": of(lambda n, *xs: F.huber_loss(*xs, n), MATRIX, POSITIVE),
    "layer_normalization": of(
        lambda n, *xs: F.layer_normalization(*xs, n), MATRIX, VECTOR, VECTOR
    ),
    "leaky_relu": of(lambda n, x: F.leaky_relu(x, n), MATRIX),
    "leaky_relu negative": of(lambda n, x: F.leaky_relu(x, -n), MATRIX),
    "local_response_normalization": of(
        lambda n, x: F.local_response_normalization(x, 3, n, n, n), IMAGE
    ),
    "n_step_gru": of(recurrent(F.n_step_gru, 6, 1), MATRIX),
    "n_step_lstm": of(recurrent(F.n_step_lstm, 8, 2), MATRIX),
    "n_step_rnn": of(recurrent(F.n_step_rnn, 2, 1), MATRIX),
    "normalize": of(lambda n, x: F.normalize(x, n), MATRIX),
    "pad": of(lambda n, x: F.pad(x, 1, "constant", constant_values=n), MATRIX),
    "pad_sequence": of(lambda n, *xs: F.pad_sequence(xs, padding=n), MATRIX, VECTOR[None]),
    "roi_average_align_2d": of(on_box(F.roi_average_align_2d), IMAGE),
    "roi_average_pooling_2d": of(on_box(F.roi_average_pooling_2d), IMAGE),
    "roi_max_align_2d": of(on_box(F.roi_max_align_2d), IMAGE),
    "roi_max_pooling_2d": of(on_box(F.roi_max_pooling_2d), IMAGE),
    "roi_pooling_2d": of(
        lambda n, x: F.roi_pooling_2d(x, np.array([[0, 0, 0, 4, 4]], x.dtype), 2, 2, n), IMAGE
    ),
    "rrelu": of(lambda n, x: F.rrelu(x, n / 4, n / 2), MATRIX),
    "selu": of(lambda n, x: F.selu(x, n, n), MATRIX),
    "simplified_dropconnect": of(
        lambda n, *xs: F.simplified_dropconnect(*xs, None, n), MATRIX, values(2, 4)
    ),
    "softplus": of(lambda n, x: F.softplus(x, n), MATRIX),
    "triplet": of(lambda n, *xs: F.triplet(*xs, n), MATRIX, POSITIVE, MATRIX / 2),
    "zoneout": of(lambda n, *xs: F.zoneout(*xs, n), MATRIX, POSITIVE),
}

LINKS = {
    "BatchNormalization": of(lambda n, x: L.BatchNormalization(4, n, n)(x), MATRIX),
    "BatchRenormalization": of(lambda n, x: L.BatchRenormalization(4, n, n, n, n)(x), MATRIX),
    "DecorrelatedBatchNormalization": of(
        lambda n, x: L.DecorrelatedBatchNormalization(4, 2, n, n)(x), values(6, 4) ** 2
    ),
    "GroupNormalization": of(lambda n, x: L.GroupNormalization(2, 4, n)(x), IMAGE),
    "LayerNormalization": of(lambda n, x: L.LayerNormalization(4, n)(x), MATRIX),
    "NegativeSampling": of(
        lambda n, x: L.NegativeSampling(4, [4, 3, 2, 1], 2, n)(x, LABELS), MATRIX
    ),
    "PReLU": of(lambda n, x: L.PReLU((), n)(x), MATRIX),
    "SimplifiedDropconnect": of(lambda n, x: L.SimplifiedDropconnect(4, 2, n)(x), MATRIX),
    "StatefulZoneoutLSTM": of(lambda n, x: L.StatefulZoneoutLSTM(4, 4, n, n)(x), MATRIX),
    "Swish": of(lambda n, x: L.Swish((4,), n)(x), MATRIX),
    "Linear initialized": of(lambda n, x: L.Linear(4, 2, initialW=n, initial_bias=n)(x), MATRIX),
}

#: Functions that are not in the table, and why.
LEFT_OUT = {
    "classification_summary": "its result does not have the dtype of an array",
    "clipped_relu": "it takes a float and nothing else, as it always did",
    "fixed_batch_renormalization": "it calls fixed_batch_normalization, and warns",
}
#: NumPy's linear algebra and some of Chainer's functions have no float16.
NO_FLOAT16 = {
    "decorrelated_batch_normalization",
    "DecorrelatedBatchNormalization",
    "roi_average_align_2d",
    "roi_max_align_2d",
}
#: A ratio, of which 1 is too much.
RATIOS = {"dropout", "n_step_gru", "n_step_lstm", "n_step_rnn", "simplified_dropconnect"}
RATIOS |= {"zoneout", "SimplifiedDropconnect", "StatefulZoneoutLSTM"}
#: Chainer has no second derivative of these, or not of these inputs alone.
ONCE = {name for name in FUNCTIONS if name.startswith("roi_")} | {*LINKS}
ONCE |= {"batch_renormalization", "decorrelated_batch_normalization", "group_normalization"}
ONCE |= {"local_response_normalization"}
ELEMENTWISE = [name for name in FUNCTIONS if name.endswith(" a number")]
ELEMENTWISE += ["clip", "elu", "leaky_relu", "leaky_relu negative", "rrelu", "selu", "softplus"]
CASES = FUNCTIONS | LINKS


def derivatives(name, number, dtype, without_axes=False):
    """Return a function's result, its gradients, and the gradients of their squares."""
    function, arrays = CASES[name]
    if without_axes:
        arrays = [array.ravel()[1] for array in arrays]
    xs = [chainer.Variable(np.array(array, dtype)) for array in arrays]
    np.random.seed(0)
    with chainer.using_config("dtype", np.dtype(dtype)), np.errstate(all="ignore"):
        results = [function(number, *xs)]
        found = list(results)
        for _ in range(1 if name in ONCE else 2):
            total = sum(F.sum(F.cast(each * each, "d")) for each in results)
            results = chainer.grad([total], xs, enable_double_backprop=name not in ONCE)
            results = [each for each in results if each is not None]
            found += results
            if not total.requires_grad:
                break
    return [each.array for each in found]


def check(name, number, dtype, **options):
    expected = derivatives(name, number.item(), dtype, **options)
    found = derivatives(name, number, dtype, **options)
    assert len(found) == len(expected)
    for got, right in zip(found, expected, strict=True):
        assert type(got) is np.ndarray and got.dtype == right.dtype == dtype
        np.testing.assert_array_equal(got, right, repr(number))


@pytest.fixture(autouse=True)
def with_numpy():
    with chainer.using_config("use_ideep", "never"):
        yield


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (n, d)
        for n in CASES
        for d in ("float16", "float32")
        if d == "float32" or n not in NO_FLOAT16
    ],
)
def test_the_dtype_is_that_of_the_array(name, dtype):
    whole = np.int64(0 if name in RATIOS else 1)
    for number in (np.float64(0.5), np.float32(0.5), whole):
        check(name, number, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_array_without_axes_gives_an_array(name, dtype):
    check(name, np.float64(0.5), dtype, without_axes=True)


def test_no_function_or_link_that_takes_a_number_is_missing():
    for module, table in ((F, FUNCTIONS), (L, LINKS)):
        taking = {
            name
            for name, function in inspect.getmembers(module, callable)
            for parameter in inspect.signature(function).parameters.values()
            if isinstance(parameter.default, float)
        }
        assert {"n_step_lstm", "NegativeSampling"} & {*table} and len(taking) > 8
        assert taking - {name.partition(" ")[0] for name in table} - {*LEFT_OUT} == set()
