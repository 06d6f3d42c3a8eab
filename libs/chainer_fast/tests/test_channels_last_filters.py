"""Filters lie channels last if the mode asks for it; snapshots and links work as before.

NumPy stands in for CuPy; ci/null_gpu shows the same by CuPy itself.
"""

import os
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.functions.connection import convolution_2d, deconvolution_2d

from chainer_compat import surgery
from chainer_fast.channels_last import layout
from chainer_fast.repairs import compute_mode, filters

LINKS = {
    "convolution": lambda: L.Convolution2D(3, 4, 3),
    "without a size": lambda: L.Convolution2D(None, 4, 3),
    "dilated": lambda: L.DilatedConvolution2D(3, 4, 2, dilate=2),
    "deconvolution": lambda: L.Deconvolution2D(3, 4, 3),
    "a deconvolution without a size": lambda: L.Deconvolution2D(None, 4, 3),
}


@pytest.fixture(autouse=True)
def in_gpu_memory(monkeypatch):
    """Take all NumPy arrays for CuPy's, and let float16 be channels last."""
    np.random.seed(0)  # Adam moves a filter whose gradient is almost zero either way
    monkeypatch.setenv(compute_mode.CUDNN, "1")
    monkeypatch.setattr(chainer.global_config, "use_ideep", "never")
    for module, name in (
        (convolution_2d, "convolution_2d"),
        (deconvolution_2d, "deconvolution_2d"),
    ):
        cuda = SimpleNamespace(ndarray=np.ndarray, cupy=np)
        view = surgery.view(module, cuda=cuda)
        filters.lay_out_filters(view)
        monkeypatch.setattr(module, name, getattr(view, name))
    with (
        chainer.using_config("compute_mode", layout.MODE),
        chainer.using_config("dtype", np.dtype("f2")),
    ):
        yield


def images(dtype="f2"):
    return np.random.RandomState(0).uniform(-1, 1, (2, 3, 6, 5)).astype(dtype)


@pytest.mark.parametrize("name", LINKS)
def test_filters_are_laid_out_in_the_first_call(name):
    link = LINKS[name]()
    with chainer.using_config("compute_mode", None):
        other = LINKS[name]()
        expected = [each(images()).array for each in (link, other)]
        before = link.W.array
        assert before.flags.c_contiguous
    y = link(images()).array
    first = link.W.array
    assert layout.is_channels_last(first)
    np.testing.assert_array_equal(first, before)
    np.testing.assert_allclose(y, expected[0], atol=2e-3)
    link.copyparams(other)
    np.testing.assert_allclose(link(images()).array, expected[1], atol=2e-3)
    assert link.W.array is first
    assert link.W.layout is None


def test_filters_of_other_dtypes_stay():
    with chainer.using_config("dtype", np.dtype("f4")):
        link = LINKS["convolution"]()
    before = link.W.array
    link(images("f4"))
    assert link.W.array is before


def test_shared_filters_are_laid_out_once():
    one = LINKS["convolution"]()
    second = one.copy(mode="share")
    second(images())
    assert one.W.array is second.W.array
    assert layout.is_channels_last(one.W.array)


def test_filters_that_are_no_parameter_stay():
    """A link's W may be a variable that is computed from something else."""
    w = chainer.Variable(np.ones((4, 3, 3, 3), "f2"))
    before = w.array
    y = convolution_2d.convolution_2d(images(), W=w)
    assert w.array is before
    np.testing.assert_array_equal(y.array, convolution_2d.convolution_2d(images(), before).array)


def train(link, optimizer, n_steps=2):
    for _ in range(n_steps):
        optimizer.update(lambda: F.sum(link(images()) ** 2))
    return link.W.array


@pytest.mark.parametrize("first", [None, layout.MODE])
@pytest.mark.parametrize("is_used", [False, True], ids=["new", "trained"])
def test_training_goes_on_from_a_snapshot_in_the_other_order(first, is_used, tmp_path):
    files = [tmp_path / name for name in ("link.npz", "optimizer.npz")]
    link = LINKS["convolution"]()
    optimizer = chainer.optimizers.Adam(0.01).setup(link)
    with chainer.using_config("compute_mode", first):
        train(link, optimizer)
        for file, each in zip(files, (link, optimizer), strict=True):
            chainer.serializers.save_npz(file, each)
        expected = train(link, optimizer)
    other = LINKS["convolution"]()
    optimizer = chainer.optimizers.Adam(0.01).setup(other)
    with chainer.using_config("compute_mode", None if first else layout.MODE):
        if is_used:
            train(other, optimizer)
        for file, each in zip(files, (other, optimizer), strict=True):
            chainer.serializers.load_npz(file, each)
        found = train(other, optimizer)
    assert layout.is_channels_last(found) != layout.is_channels_last(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["convolution", "deconvolution"])
def test_without_cudnn_the_mode_is_an_error_that_says_what_to_do(name, monkeypatch):
    monkeypatch.delenv(compute_mode.CUDNN)
    link = LINKS[name]()
    with pytest.raises(RuntimeError, match=r"compute_mode='cudnn_fast' .* CHAINER_COMPAT_CUDNN=1"):
        link(images())
    with chainer.using_config("compute_mode", None):
        link(images())
    with chainer.using_config("dtype", np.dtype("f4")):
        LINKS[name]()(images("f4"))


def test_the_variable_without_cudnn_is_an_error(python, fake_cupy, fake_cudnn):
    asked = {
        "PYTHONPATH": os.pathsep.join((fake_cupy, fake_cudnn)),
        "CHAINER_CHANNELS_LAST": "1",
    }
    error = python("import chainer", fails=True, **asked)
    assert "set CHAINER_COMPAT_CUDNN=1 before" in error
