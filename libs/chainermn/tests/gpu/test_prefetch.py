"""Batches that a real GPU gets in advance, while it is busy."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
import pytest

from chainermn.iterators import prefetch_to_device

pytestmark = pytest.mark.gpu

STEPS, N = 30, 1 << 20


def test_batches_are_the_same_and_stay(a_gpu: Any) -> None:
    import cupy

    device = chainer.get_device(f"@cupy:{cupy.cuda.Device().id}")
    data = np.arange(12, dtype=np.float32)[:, None] + np.zeros(N, np.float32)
    iterator, convert = prefetch_to_device(
        chainer.iterators.SerialIterator(data, 4, shuffle=False), device=device
    )
    work, kept, sums = cupy.ones((2048, 2048), np.float32), [], []
    for step in range(STEPS):
        batch = convert(iterator.next(), device)
        work = cupy.sqrt(work @ work)  # so that the host is ahead of the GPU
        sums.append(batch.mean(axis=1))
        if step % 7 == 0:
            kept.append((step, batch))
        del batch
    iterator.finalize()
    expected = np.arange(4 * STEPS).reshape(STEPS, 4) % 12
    np.testing.assert_array_equal(a_gpu.to_host(cupy.stack(sums)), expected)
    for step, batch in kept:
        assert (a_gpu.to_host(batch) == expected[step][:, None]).all()
