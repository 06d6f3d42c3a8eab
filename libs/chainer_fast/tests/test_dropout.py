"""Dropout in steps with graphs: Philox's numbers, which differ by step, by call and by element."""

import ctypes
import itertools
from types import SimpleNamespace

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.functions.noise import dropout

from chainer_fast.graphs.drawing import Draws
from chainer_fast.graphs.philox import PHILOX
from chainer_fast.repairs import recordable
from libs.chainer_fast.tests.reference_philox import WORD, kept, philox
from libs.chainer_fast.tests.stand_in_kernels import Kernel, to_gpu

# Counter, key and words, as Random123 publishes them in its file kat_vectors.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD - 1] * 4, [WORD - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.fixture
def gpu(monkeypatch, compiled):
    """Let Chainer compute dropout in steps with graphs on a stand-in for a GPU."""
    monkeypatch.setattr(Kernel, "launches", [])
    monkeypatch.setattr(Kernel, "compiled", staticmethod(compiled), raising=False)
    monkeypatch.setattr(cuda, "elementwise", Kernel)
    empty = lambda shape, dtype: to_gpu(np.full(shape, np.nan, dtype))  # noqa: E731
    monkeypatch.setattr(cuda, "cupy", SimpleNamespace(empty=empty))
    forward = dropout.Dropout.forward_gpu
    monkeypatch.setattr(dropout.Dropout, "forward_gpu", getattr(forward, "__wrapped__", forward))
    recordable.drop_by_counting(dropout)
    monkeypatch.setattr(dropout.Dropout, "forward_cpu", dropout.Dropout.forward_gpu)


def key(seed, step):
    return to_gpu(np.array([seed, step], np.uint64))


@pytest.mark.parametrize(("counter", "key_words", "words"), KNOWN)
def test_known_answers(counter, key_words, words, compiled):
    assert philox(counter, key_words) == words
    function = compiled('#define __device__ extern "C"\n' + PHILOX).chainer_fast_philox
    seed, step = (low + high * WORD for low, high in (key_words, counter[2:]))
    found = (ctypes.c_uint32 * 4)()
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    function(wide(seed), wide(step), narrow(counter[1]), narrow(counter[0]), found)
    assert list(found) == words


SEED, STEP = 0x0123456789ABCDEF, 7 * WORD + 3


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (5, 7), (0, 2)])
def test_kept_elements_are_those_of_the_counter(shape, dtype, gpu):
    x = to_gpu(np.random.default_rng(0).normal(size=shape).astype(dtype))
    draws = Draws(key(SEED, STEP))
    with draws.step():
        for call, ratio in enumerate((0.5, 0.3, 0.0)):
            y, mask = F.dropout(x, ratio, return_mask=True)
            scale = x.dtype.type(1 / (1 - ratio))
            expected = kept(x.size, ratio, SEED, STEP, call).reshape(shape) * scale
            assert mask.dtype == y.dtype == x.dtype
            np.testing.assert_array_equal(mask, expected)
            np.testing.assert_array_equal(y.array, x * mask)


def test_gradient_is_that_of_the_mask(gpu):
    x = chainer.Variable(to_gpu(np.arange(1, 10, dtype="f")))
    with Draws(key(1, 0)).step():
        y, mask = F.dropout(x, 0.25, return_mask=True)
        y.grad = to_gpu(np.full(9, 3, "f"))
        y.backward()
    np.testing.assert_array_equal(x.grad, 3 * mask)


def masks(draws, n_calls=2, size=4000):
    with draws.step():
        x = to_gpu(np.ones(size, "f"))
        return [F.dropout(x, 0.4, return_mask=True)[1] > 0 for _ in range(n_calls)]


def test_each_step_draws_other_numbers_and_the_same_step_the_same(gpu):
    draws = Draws(key(1, 0))
    first = masks(draws)
    draws.key[1] = 1  # written between launches of a graph, which counts its calls only once
    second = masks(draws)
    draws.key[:] = 2, 0
    third = masks(draws)
    draws.key[:] = 1, 0
    assert all((a == b).all() for a, b in zip(first, masks(draws), strict=True))
    for a, b in itertools.combinations([*first, *second, *third], 2):
        # Independent masks agree in 0.4**2 + 0.6**2 of 4000 elements; five deviations are 0.04.
        assert abs((a == b).mean() - 0.52) < 0.04
        assert abs(a.mean() - 0.6) < 0.04


@pytest.mark.parametrize("in_graphs", [True, False])
def test_a_given_mask_and_other_steps_are_left_to_chainer(in_graphs, gpu, monkeypatch):
    x, mask = to_gpu(np.arange(3.0)), to_gpu(np.array([0.0, 2, 2]))
    if in_graphs:
        draws = Draws(key(0, 0))
        with draws.step():
            np.testing.assert_array_equal(F.dropout(x, mask=mask).array, [0, 2, 4])
            assert draws.next_call() == 0
    else:
        drawn = SimpleNamespace(rand=lambda *shape, dtype: to_gpu(np.full(shape, 0.3, dtype)))
        monkeypatch.setattr(cuda.cupy, "random", drawn, raising=False)
        monkeypatch.setattr(
            cuda, "elementwise", lambda *texts: lambda x, r, scale, ratio: (r, ratio)
        )
        node = dropout.Dropout(0.5)
        assert node.forward_gpu((x,)) == (0.5,)
        assert (node.mask == np.float32(0.3)).all()
    assert Kernel.launches == []
