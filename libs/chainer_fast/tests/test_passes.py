"""Repairs that save copies compute what Chainer computes without them, bit for bit."""

import itertools
import sys

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_compat.registry import REPAIRS
from chainer_fast.repairs import passes

SAVING_COPIES = [repair.name for repair in REPAIRS if repair.fault is passes.copies_are_made]
POOLINGS = [
    ((2, 3, 8, 8), 2, 2, 0),
    ((2, 3, 9, 7), 3, 2, 1),
    ((1, 2, 5, 5), 3, 5, 1),
    ((2, 3, 8, 8), (3, 2), 1, 0),
    ((2, 3, 7), 2, 2, 0),
    ((2, 3, 6, 6, 6), (2, 3, 2), 2, 0),
    ((1, 1, 20, 20), 17, 1, 0),  # more places than a byte can count
]


def pooled(special):
    found = []
    for dtype in "efd":
        for shape, ksize, stride, pad in POOLINGS:
            for cover_all in (False, True):
                random = np.random.default_rng(0)
                x = chainer.Variable(random.integers(-3, 4, shape).astype(dtype))
                if special is not None:
                    x.array.reshape(-1)[::5] = special
                y = F.max_pooling_nd(x, ksize, stride, pad, cover_all)
                gy = chainer.Variable(random.normal(size=y.shape).astype(dtype))
                gy.array.reshape(-1)[0] = np.inf
                (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
                (ggy,) = chainer.grad([F.sum(gx * x)], [gy])
                again = F.max_pooling_nd(x, ksize, stride, pad, cover_all, return_indices=True)
                found += [y.array, again[1], gx.array, ggy.array]
    return found


def rectified():
    found = []
    numbers = np.random.default_rng(0).normal(size=(5, 10))
    numbers[0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1]
    inputs = [numbers, *(np.array(number) for number in (0.5, -0.5, 0.0))]
    for dtype, slope, values in itertools.product("efd", (0.2, 0.0, 1.0, -0.5, 2.0), inputs):
        x, gy = (chainer.Variable(np.array(each, dtype)) for each in (values, values + 1))
        y = F.leaky_relu(x, slope)
        (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
        (ggy,) = chainer.grad([F.sum(gx * gx)], [gy])
        found += [y.array, gx.array, ggy.array]
    assert all(type(array) is np.ndarray for array in found)
    return found


def normalized():
    found = []
    shapes = [((4, 3, 5, 6), None, 3), ((7, 3), None, 3), ((4, 5, 3), (0, 1), 3)]
    for (shape, axis, size), dtype, gamma_dtype in itertools.product(shapes, "efd", "efd"):
        random = np.random.default_rng(0)
        x = chainer.Variable(random.normal(2, 3, shape).astype(dtype))
        gamma, beta = random.normal(size=(2, size)).astype(gamma_dtype)
        mean, var = random.random((2, size)).astype(gamma_dtype)
        fixed = F.fixed_batch_normalization(x, gamma, beta, mean, var, axis=axis)
        y = F.batch_normalization(x, gamma, beta, running_mean=mean, running_var=var, axis=axis)
        y.grad = random.normal(size=y.shape).astype(y.dtype)
        y.backward()
        found += [fixed.array, y.array, x.grad, mean, var]
    return found


CALLS = [f"pooled({special})" for special in ("None", "np.inf", "-np.inf", "np.nan")]
CALLS += ["rectified()", "normalized()"]


@pytest.fixture(scope="module")
def without(execute, tmp_path_factory):
    """Return what calls of this file's functions return without the repairs."""
    out = tmp_path_factory.mktemp("without")
    code = (
        f"import sys; sys.path.insert(0, {str(__file__).rpartition('/')[0]!r})\n"
        "import numpy as np\n"
        "from test_passes import *\n"
        "np.seterr(all='ignore')\n"
        f"for call in CALLS: np.savez(f'{out}/{{call}}.npz', *eval(call))"
    )
    environment = {"CHAINER_COMPAT_SKIP": ",".join(SAVING_COPIES), "CHAINER_USE_IDEEP": "never"}
    ended = execute(sys.executable, "-c", code, **environment)
    assert ended.returncode == 0, ended.stderr

    def load(call):
        with np.load(out / f"{call}.npz") as arrays:
            return [arrays[f"arr_{n}"] for n in range(len(arrays.files))]

    return load


@pytest.mark.parametrize("call", CALLS)
def test_results_and_gradients(call, without):
    with chainer.using_config("use_ideep", "never"), np.errstate(all="ignore"):
        found = eval(call)
    expected = without(call)
    assert len(found) == len(expected) > 0
    for got, right in zip(found, expected, strict=True):
        assert got.dtype == right.dtype
        np.testing.assert_array_equal(got, right)
