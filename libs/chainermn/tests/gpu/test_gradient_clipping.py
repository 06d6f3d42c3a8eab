"""Gradient clipping on a real GPU, with the same results as in host memory."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.optimizers import GradientClipping

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("threshold", [0.5, 100.0])
@pytest.mark.parametrize("bad", [1.0, np.inf, np.nan])
def test_as_in_host_memory(a_gpu: Any, dtype: str, threshold: float, bad: float) -> None:
    values = np.random.default_rng(0).normal(size=(20, 30)).astype(dtype)
    values[0, 0] = bad

    def clipped(place: Any) -> Any:
        model = chainer.Link()
        with model.init_scope():
            model.a = chainer.Parameter(place(np.zeros_like(values)))
        model.a.grad = place(values.copy())
        GradientClipping(threshold)(chainer.optimizers.SGD().setup(model))
        return model.a.grad

    found = clipped(a_gpu.to_gpu)
    assert a_gpu.holds(found)
    assert found.dtype == dtype
    tolerance = 1e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(a_gpu.to_host(found), clipped(np.array), rtol=tolerance)
