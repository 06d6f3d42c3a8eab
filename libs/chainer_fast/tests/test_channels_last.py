"""Functions keep images channels last, tested on arrays in host memory whose results have C order.

Chainer computes the expected values in float64, from plain arrays.
"""

import importlib

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.functions.array import concat
from chainer.functions.normalization import batch_normalization

from chainer_fast.channels_last.layout import is_channels_last
from chainer_fast.repairs import channels_last as repairs
from libs.chainer_fast.tests.functions_of_images import (
    FUNCTIONS,
    NORMALIZE,
    SHAPE,
    assert_close,
    differentiate,
    draw,
    weights,
)
from libs.chainer_fast.tests.stand_in_layout import Array, channels_last, in_c_order, with_gaps

LAYOUTS = {"channels last": channels_last, "C order": in_c_order, "with gaps": with_gaps}
MIXED = {
    # name: (order of the first array, of others, of gradients)
    "channels last": (channels_last, channels_last, channels_last),
    "others in C order": (channels_last, in_c_order, channels_last),
    "others with gaps": (channels_last, with_gaps, channels_last),
    "gradients in C order": (channels_last, channels_last, in_c_order),
    "all in C order": (in_c_order, in_c_order, in_c_order),
}


@pytest.fixture
def kept(monkeypatch):
    """Let functions keep the layout of arrays in host memory."""
    monkeypatch.setattr(chainer.global_config, "use_ideep", "never")
    monkeypatch.setattr(repairs, "array_type", lambda: Array)

    for module, functions in repairs.ELEMENTWISE.items():
        for name, held in functions.items():
            owner = getattr(importlib.import_module(f"chainer.functions.{module}"), name)
            method = "forward_cpu" if "forward_cpu" in vars(owner) else "forward"
            own = giving_arrays_of_gpus(getattr(owner, method), held)
            monkeypatch.setattr(owner, method, repairs.elementwise(own, held))
    own = concat.Concat.forward
    monkeypatch.setattr(concat.Concat, "forward", repairs.concatenate(own))
    for owner, name in (
        (batch_normalization, "_apply_bn_fwd"),
        (batch_normalization.GeneralBatchNormalizationImpl, "backward"),
        (batch_normalization.FixedBatchNormalizationGrad, "forward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be undone
    repairs.keep_layout_of_normalization(batch_normalization)


def giving_arrays_of_gpus(own, held):
    """Return a ``forward`` whose results and attributes pass for CuPy arrays."""

    def forward(self, inputs):
        results = own(self, inputs)
        if not isinstance(inputs[0], Array):
            return results
        for name in held:
            setattr(self, name, getattr(self, name).view(Array))
        return tuple(result.view(Array) for result in results)

    return forward


def compare(function, arrays, first, others, of_gradients):
    """Return a function's value and gradients, after a comparison with float64."""
    given = [first(arrays[0].astype("e")), *(others(array.astype("e")) for array in arrays[1:])]
    found = differentiate(function, given, weights(of_gradients, "e"))
    for ours, expected in zip(
        found, differentiate(function, arrays, weights(np.asarray, "d")), strict=True
    ):
        assert [array.shape for array in ours] == [array.shape for array in expected]
        assert_close(ours, expected)
    return found[0]


@pytest.mark.parametrize("orders", MIXED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_the_layout(name, orders, kept):
    n, function = FUNCTIONS[name]
    first, *_, of_gradients = MIXED[orders]
    y, gx, *_ = compare(function, draw(n), *MIXED[orders])
    assert is_channels_last(y) == (first is channels_last)
    # A gradient of a concatenation is a view of the whole; others may go on in C order.
    if first is of_gradients and not name.startswith("concatenate"):
        assert is_channels_last(gx) == (first is channels_last)


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (2, 8, 1, 1), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "dropout"])
def test_one_channel_or_one_pixel(name, shape, kept):
    n, function = FUNCTIONS[name]
    compare(function, draw(n, shape), channels_last, channels_last, channels_last)


@pytest.mark.parametrize("others", LAYOUTS)
@pytest.mark.parametrize("name", NORMALIZE)
def test_batch_normalization(name, others, kept):
    n, normalize = NORMALIZE[name]
    arrays = [*draw(1), *(2 + array for array in draw(n, SHAPE[1]))]
    x, *by_channel = arrays
    for x_layout, gy_layout in (
        (channels_last, LAYOUTS[others]),
        (LAYOUTS[others], channels_last),
    ):
        given = [x_layout(x.astype("e")), *(in_c_order(each.astype("f")) for each in by_channel)]
        found, _ = differentiate(normalize, given, weights(gy_layout, "e"))
        assert is_channels_last(found[1])
        assert is_channels_last(found[0]) == is_channels_last(given[0])
        expected, _ = differentiate(normalize, arrays, weights(np.asarray, "d"))
        assert_close(found, expected)


def test_other_axes_are_normalized_as_they_were(kept):
    x, gamma = draw(1)[0], draw(1, SHAPE[3])[0]
    given = [channels_last(x), in_c_order(gamma), in_c_order(gamma)]
    for normalize in (
        lambda *inputs: F.batch_normalization(*inputs, axis=(0, 1, 2)),
        lambda *inputs: F.fixed_batch_normalization(*inputs, gamma, gamma**2, axis=(0, 1, 2)),
    ):
        found, _ = differentiate(normalize, given, weights(channels_last, "d"))
        expected, _ = differentiate(normalize, [x, gamma, gamma], weights(np.asarray, "d"))
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


def test_masks_of_dropout_have_chainers_shape(kept):
    x = channels_last(draw(1)[0].astype("e"))
    variable = chainer.Variable(x)
    y, mask = F.dropout(variable, 0.5, return_mask=True)
    assert is_channels_last(y.array) and is_channels_last(mask)
    assert mask.shape == SHAPE
    np.testing.assert_array_equal(y.array, x * mask)
    (gradient,) = chainer.grad([y], [variable], [chainer.Variable(x)])
    np.testing.assert_array_equal(gradient.array, x * mask)
    assert is_channels_last(gradient.array)
    # A mask of the user's stays the same object.
    own = in_c_order(mask)
    again, returned = F.dropout(x, mask=own, return_mask=True)
    assert returned is own and own.flags.c_contiguous
    np.testing.assert_array_equal(again.array, y.array)


def test_other_arrays_with_four_axes_are_broadcast(kept):
    x, scale = (draw(1, shape)[0].astype("e") for shape in (SHAPE, (2, 8, 1, 1)))
    inputs = [chainer.Variable(channels_last(x)), chainer.Variable(in_c_order(scale))]
    y = inputs[0] * inputs[1] + inputs[1]
    gradients = chainer.grad([y], inputs, [inputs[0]])
    assert is_channels_last(y.array) and is_channels_last(gradients[0].array)
    np.testing.assert_array_equal(y.array, x * scale + scale)
    np.testing.assert_array_equal(gradients[0].array, x * scale)
    expected = (x * x + x).sum((2, 3), dtype="d", keepdims=True)
    np.testing.assert_allclose(gradients[1].array, expected, rtol=0, atol=1e-2)


def test_other_shapes_go_chainers_way(kept):
    x, flat_ = channels_last(draw(1)[0]), in_c_order(draw(1, SHAPE[3])[0])
    y = chainer.Variable(x) + chainer.Variable(flat_)
    assert y.array.flags.c_contiguous
    np.testing.assert_array_equal(y.array, x + flat_)


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_other_dtypes_go_chainers_way(dtype, kept):
    """Chainer's own convolutions give channels-last images of these, and read C order faster."""
    x, ones = channels_last(draw(1)[0].astype(dtype)), in_c_order(np.ones(SHAPE[1], dtype))
    for y in (F.relu(x), F.add(x, x), F.concat([x, x]), F.batch_normalization(x, ones, ones)):
        assert y.array.flags.c_contiguous


def test_plain_arrays_of_numpys_go_chainers_way(kept):
    x = np.asarray(channels_last(draw(1)[0]))
    y = F.concat([F.relu(chainer.Variable(x)) + x, x])
    assert type(y.array) is np.ndarray
    np.testing.assert_array_equal(y.array, np.concatenate([np.maximum(x, 0) + x, x], 1))


def test_an_error_leaves_a_function_as_it_was(kept):
    x = channels_last(draw(1)[0])
    node = concat.Concat(axis=1)
    with pytest.raises(ValueError, match="must match"):
        node.forward((x, x[:, :, :1]))
    assert node.axis == 1
