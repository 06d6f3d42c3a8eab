"""Functions keep images channels last on a GPU, and give what they give in float64 on the CPU."""

import pkgutil

import chainer
import numpy as np
import pytest

from chainer_fast.channels_last.layout import converted, is_channels_last
from chainer_fast.repairs import channels_last as repairs
from libs.chainer_fast.tests.functions_of_images import (
    FUNCTIONS,
    NORMALIZE,
    assert_close,
    differentiate,
    draw,
    weights,
)

pytestmark = pytest.mark.gpu

#: More than where kernels move 16 bytes at a time.
LARGE = (4, 64, 57, 64)
SHAPES = [(2, 8, 3, 5), (3, 5, 2, 7), (2, 1, 3, 5), (2, 8, 1, 1), LARGE]
CASES = {name: (n, 0, function) for name, (n, function) in FUNCTIONS.items()}
CASES |= {name: (1, n, function) for name, (n, function) in NORMALIZE.items()}


@pytest.fixture
def kept(device, monkeypatch):
    """Let functions keep the layout, as ``CHAINER_COMPAT_CUDNN=1`` does."""
    device.use()

    places = [
        (f"{module}.{owner}", method)
        for module, owners in repairs.ELEMENTWISE.items()
        for owner in owners
        for method in ("forward", "forward_gpu")
    ]
    places += [("array.concat.Concat", "forward")]
    normalization = "normalization.batch_normalization"
    places += [(f"{normalization}.GeneralBatchNormalizationImpl", "backward")]
    places += [(f"{normalization}.FixedBatchNormalizationGrad", "forward")]
    places += [(normalization, "_apply_bn_fwd")]
    for place, method in places:
        owner = pkgutil.resolve_name(f"chainer.functions.{place}")
        if method in vars(owner):
            monkeypatch.setattr(owner, method, getattr(owner, method))  # to be undone
    repairs.keep_layout(chainer.functions)
    return device


def compute(name, shape, device, others):
    """Return results on the GPU and on the CPU; ``others`` arranges all arrays but the first."""
    n, n_by_channel, function = CASES[name]

    def last(array):
        return converted(device.xp, device.send(array))

    images, by_channel = draw(n, shape), [2 + each for each in draw(n_by_channel, shape[1])]
    first, *rest = (array.astype("e") for array in images)
    given = [last(first), *map(others, rest)]
    given += [device.send(array.astype("f")) for array in by_channel]
    found = differentiate(function, given, weights(last, "e"))
    expected = differentiate(function, images + by_channel, weights(np.asarray, "d"))
    return found, expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions(name, shape, kept):
    """Results and gradients lie channels last, whatever the strides of other arrays are."""
    for others in (kept.send, lambda array: converted(kept.xp, kept.send(array))):
        (found, again), expected = compute(name, shape, kept, others)
        assert_close(found, expected[0])
        if name not in NORMALIZE and shape != LARGE:
            assert_close(again, expected[1])
        if shape[1] > 1 and shape[2:] != (1, 1):
            assert is_channels_last(found[0])
            # A gradient of a concatenation is a view of the whole.
            assert is_channels_last(found[1]) or name.startswith("concatenate")
