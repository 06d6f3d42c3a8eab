"""The kernels that gather and scatter gradients, on a real GPU."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from chainermn.gradients.batched_copy import ALIGNMENT, DTYPES, BatchedCopy, piece_length
from chainermn.transport.gpu.device import the_gpu

pytestmark = pytest.mark.gpu


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(n: int, dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([n, seed]).normal(size=n).astype(dtype)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.astype("f8"), expected.astype("f8"))


def check(a_gpu: Any, arrays: list[Any], wire: np.dtype) -> None:
    """Gather and scatter these arrays, and compare the results with NumPy's."""
    gpu = the_gpu()
    given = [a_gpu.to_host(array) for array in arrays]
    copy = BatchedCopy(gpu, [a.size for a in given], [a.dtype for a in given], wire)
    buffer = gpu.empty(copy.length, wire)
    copy.gather(arrays, buffer)
    expected = [array.astype(wire) for array in given]
    padded = [np.pad(part, (0, -part.size % ALIGNMENT)) for part in expected]
    assert_same(a_gpu.to_host(buffer), np.concatenate(padded))
    copy.scatter(buffer, arrays, 3)
    for array, part, before in zip(arrays, expected, given, strict=True):
        wide = np.float64 if np.dtype("f8") in (wire, before.dtype) else np.float32
        quotient = (part.astype(wide) / wide(3)).astype(before.dtype)
        assert_same(a_gpu.to_host(array), quotient)


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_all_dtypes_and_odd_sizes(a_gpu: Any, wire: str, offset: int) -> None:
    """Start each array ``offset`` elements past an aligned address."""
    arrays = []
    for dtype in map(dtype_of, DTYPES):
        block = piece_length(dtype, dtype_of(wire))
        for n in (1, 0, 7, 63, 64, 65, 1000, block - 1, block, 2 * block + 3):
            arrays.append(a_gpu.to_gpu(numbers(n + offset, dtype))[offset:])
    check(a_gpu, arrays, dtype_of(wire))
    for array in arrays:
        # Nothing has been written in front of the array.
        base = array if array.base is None else array.base
        before = numbers(base.size, array.dtype)[:offset]
        assert_same(a_gpu.to_host(base[:offset]), before)


@pytest.mark.parametrize("wire", ["float16", "float32"])
def test_many_arrays_most_of_them_small(a_gpu: Any, wire: str) -> None:
    sizes = [64, 64, 1, 512 * 2048, 2048, *range(1, 300), 3 * 3 * 512 * 512]
    arrays = [a_gpu.to_gpu(numbers(n, np.dtype("f4"))) for n in sizes]
    check(a_gpu, arrays, np.dtype(wire))


@pytest.mark.timeout(120)
def test_more_elements_than_32_bits_count(a_gpu: Any) -> None:
    if a_gpu.free_memory() < 10 << 30:
        pytest.skip("less than 10 GiB of GPU memory are free")
    gpu, dtype, n = the_gpu(), np.dtype("f2"), (1 << 31) + 77
    large, small = gpu.empty(n, dtype), a_gpu.to_gpu(np.arange(5, dtype=dtype))
    large[...] = 1
    large[-3:] = a_gpu.to_gpu(np.array([2, 4, 6], dtype))
    copy = BatchedCopy(gpu, [n, 5], [dtype, dtype], dtype)
    buffer = gpu.empty(copy.length, dtype)
    copy.gather([large, small], buffer)
    assert a_gpu.to_host(buffer[n - 4 : n + 1]).tolist() == [1, 2, 4, 6, 0]
    assert a_gpu.to_host(buffer[-ALIGNMENT:][:6]).tolist() == [0, 1, 2, 3, 4, 0]
    copy.scatter(buffer, [large, small], 2)
    assert a_gpu.to_host(large[-4:]).tolist() == [0.5, 1, 2, 3]
    assert a_gpu.to_host(small).tolist() == [0, 0.5, 1, 1.5, 2]


def test_the_host_waits_for_nothing(a_gpu: Any) -> None:
    """Use gradients at different addresses in each iteration."""
    gpu, dtype, n, rounds = the_gpu(), np.dtype("f4"), 1000, 20
    copy = BatchedCopy(gpu, [n], [dtype], dtype)
    buffer, result = gpu.empty(copy.length, dtype), gpu.empty(n, dtype)
    result[...] = 0
    arrays = [a_gpu.to_gpu(np.full(n, number, dtype)) for number in range(rounds)]

    def iterations() -> None:
        for array in arrays:
            copy.gather([array], buffer)
            copy.scatter(buffer, [array], 2)
            copy.scatter(buffer, [result], 1)

    iterations()  # compiles the kernels
    a_gpu.to_host(result)
    # Allocating pinned memory may make the host wait, so put enough into CuPy's pool first.
    pinned = [gpu.pinned(8) for _ in range(4 * rounds)]
    del pinned
    go_on = threading.Event()
    was_told: list[bool] = []
    a_gpu.hold(lambda: was_told.append(go_on.wait(20)))
    iterations()
    go_on.set()
    for number, array in enumerate(arrays):
        assert (a_gpu.to_host(array) == number / 4).all()
    assert (a_gpu.to_host(result) == (rounds - 1) / 2).all()  # halved once, by the first call
    assert was_told == [True]
