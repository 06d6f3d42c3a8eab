"""Products by our own calls of cuBLAS are those of NumPy, for all shapes, strides and dtypes."""

import ctypes
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from chainer_fast.matrix_products import WORKSPACE_BYTES, Products, can_multiply
from libs.chainer_fast.tests.fake_cudnn.host_gpu import HostGpu

CUBLAS = (Path(__file__).parent / "stand_in_cublas.cpp").read_text()
TOLERANCE = {"e": 1e-3, "f": 1e-6, "d": 1e-15}


@pytest.fixture
def cublas(compiled):
    """Return a cuBLAS for host memory; reading a name gives a number that it has noted."""
    library = compiled(CUBLAS)

    class Noted:
        def __getattr__(self, name):
            kind = ctypes.c_int if name == "compute" else ctypes.c_longlong
            return kind.in_dll(library, name).value

    return library, Noted()


@pytest.fixture
def products(cublas):
    return Products(HostGpu(), cublas[0])


def check(found, expected, dtype):
    assert found.dtype == dtype
    assert found.shape == expected.shape
    tolerance = TOLERANCE[np.dtype(dtype).char]
    np.testing.assert_allclose(np.asarray(found, "d"), expected, rtol=tolerance, atol=tolerance)


def transposed(array):
    return array.swapaxes(-1, -2).copy().swapaxes(-1, -2) if array.ndim > 1 else array


def with_gaps(array):
    larger = np.full([2 * n for n in array.shape], np.nan, array.dtype)
    larger[tuple(slice(None, None, 2) for _ in array.shape)] = array
    return larger[tuple(slice(None, None, 2) for _ in array.shape)]


def with_padded_rows(array):
    larger = np.full((*array.shape[:-1], array.shape[-1] + 3), np.nan, array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger[..., : array.shape[-1]]


def backwards(array):
    return array[::-1].copy()[::-1]


def at_odd_addresses(array):
    record = np.zeros(array.shape, [("flag", "u1"), ("value", array.dtype)])
    record["value"] = array
    return record["value"]


LAYOUTS = [np.array, transposed, with_gaps, with_padded_rows, backwards, at_odd_addresses]
SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((1, 3), (3, 4)),
    ((4, 1), (1, 3)),
    ((1, 1), (1, 1)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((6, 5, 2, 3), (6, 5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((6, 5, 2, 3), (6, 1, 3, 4)),
    ((1, 1, 2, 3), (1, 3, 2)),
    ((0, 3), (3, 4)),
    ((2, 0), (0, 4)),
    ((5, 2, 0), (0, 4)),
    ((0,), (0,)),
    ((0, 2, 3), (3, 4)),
]
each_shape = pytest.mark.parametrize("shapes", SHAPES, ids=str)


def operands(shapes, dtypes="dd", seed=0):
    random = np.random.default_rng(seed)
    # Sums of such integers are exact, also in float16.
    return [
        random.integers(-4, 5, shape).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@each_shape
def test_matmul_with_all_strides(shapes, products):
    a, b = operands(shapes)
    for lay_a, lay_b in itertools.product(LAYOUTS, repeat=2):
        check(products.matmul(lay_a(a), lay_b(b)), np.matmul(a, b), "d")


@each_shape
@pytest.mark.parametrize("dtypes", ["ee", "ff", "ef", "fd", "de", "bf"])
def test_dtypes_and_transposes(shapes, dtypes, products):
    a, b = operands(shapes, dtypes)
    dtype = np.result_type(a, b)
    check(products.matmul(a, transposed(b)), np.matmul(a.astype("d"), b.astype("d")), dtype)
    if a.shape[-1] and 1 < a.ndim <= b.ndim:
        back = np.matmul(a.swapaxes(-1, -2).astype("d"), np.matmul(a, b).astype("d"))
        check(products.matmul(a.swapaxes(-1, -2), np.matmul(a, b)), back, dtype)


@each_shape
def test_dot(shapes, products):
    a, b = operands(shapes)
    if a.ndim <= 3 and b.ndim <= 3:
        check(products.dot(a, b), np.asarray(np.dot(a, b)), "d")


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (((2, 3, 4), (3, 4, 5)), 2),
        (((2, 3), (2, 3)), 2),
        (((2, 3), (4,)), 0),
        (((2, 3, 4), (5, 3, 2)), ((0, 1), (2, 1))),
        (((2, 3, 4), (5, 3, 2)), ((-3, 1), (2, -2))),
        (((3, 2, 4, 4), (3, 5)), (0, 0)),  # a deconvolution
        (((2, 3, 2, 2, 4, 5), (6, 3, 2, 2)), ((1, 2, 3), (1, 2, 3))),  # a convolution
        (((2, 6, 4, 5), (2, 3, 2, 2, 4, 5)), ((0, 2, 3), (0, 4, 5))),  # gradient of its filters
        (((2, 0), (0, 3)), 1),
        (((0, 2), (2, 3)), 1),
    ],
    ids=str,
)
def test_tensordot(shapes, axes, products):
    a, b = operands(shapes)
    for lay in (np.array, transposed, with_gaps):
        check(products.tensordot(lay(a), lay(b), axes), np.tensordot(a, b, axes), "d")


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
def test_long_sums_are_added_up_in_float32_at_least(dtype, products, cublas):
    a = np.full((1, 4096), 1.5, dtype)
    expected = np.float64(1.5 * 1.5 * 4096)
    check(products.matmul(a, a.T), np.full((1, 1), expected), dtype)
    assert cublas[1].compute == (70 if dtype == "d" else 68)
    check(products.dot(a[0], a[0]), np.asarray(expected), dtype)


def test_tf32_is_used_where_cupy_uses_it(monkeypatch, cublas):
    library, noted = cublas
    x = np.ones((2, 2), "f")
    for value, compute in (("1", 77), ("0", 68)):
        monkeypatch.setenv("CUPY_TF32", value)
        Products(HostGpu(), library).matmul(x, x)
        assert noted.compute == compute


@pytest.mark.parametrize("lay", [np.array, transposed])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_out(dtype, lay, products):
    a, b = operands([(2, 3), (3, 4)], "ff")
    for method in (products.matmul, products.dot):
        out = lay(np.full((2, 4), np.nan, dtype))
        assert method(a, b, out) is out
        check(out, a @ b, dtype)
        with pytest.raises(ValueError, match=r"out to have shape \(2, 4\), got \(8,\)"):
            method(a, b, out.reshape(-1))
    square = operands([(3, 3)], dtype)[0]
    expected = square @ square
    check(products.matmul(square, square, out=square), expected, dtype)
    c = operands([(5, 3, 4)], "f")[0]
    out = np.full((2, 5, 4), np.nan, "f")
    assert products.dot(a, c, out=out) is out
    check(out, np.dot(a, c), "f")


def test_only_what_cublas_cannot_read_is_copied(products, cublas, monkeypatch):
    copied, before = [], cublas[1].single
    gpu_empty = HostGpu.empty
    monkeypatch.setattr(
        HostGpu, "empty", lambda self, *args: copied.append(args[0]) or gpu_empty(self, *args)
    )
    a, b = operands([(6, 2, 3), (6, 3, 4)], "ff")
    result = (6, 2, 4)
    for lay_a, lay_b, expected in (
        (np.array, np.array, [result]),
        (transposed, with_padded_rows, [result]),
        (with_gaps, np.array, [result, (6, 2, 3)]),
    ):
        copied.clear()
        products.matmul(lay_a(a), lay_b(b))
        assert copied == expected
    copied.clear()
    products.matmul(a, b[0])
    products.matmul(np.broadcast_to(a[0], a.shape), b)
    assert copied == [result] * 2
    copied.clear()
    # The axes of heads and images are in another order than in memory.
    products.matmul(a.reshape(3, 2, 2, 3).swapaxes(0, 1), np.ones((2, 3, 3, 4), "f"))
    assert copied == [(2, 3, 2, 4), (2, 3, 2, 3)]
    assert cublas[1].single == before


def test_each_thread_and_device_has_a_handle_and_a_workspace(cublas):
    library, noted = cublas
    gpu = HostGpu()
    products, x = Products(gpu, library), np.ones((2, 2), "f")
    before, seen = noted.handles, []

    def multiply(device, stream):
        gpu.number, gpu.current_stream = device, stream
        products.matmul(x, x)
        assert (noted.stream, noted.workspace_bytes) == (stream, WORKSPACE_BYTES)
        seen.append((noted.handles - before, noted.workspace))

    multiply(0, 7)
    multiply(0, 8)
    multiply(1, 8)
    thread = threading.Thread(target=multiply, args=(0, 9))
    thread.start()
    thread.join()
    multiply(0, 10)
    assert [handle for handle, _ in seen] == [1, 1, 2, 3, 3]
    workspaces = [workspace for _, workspace in seen]
    assert workspaces[0] == workspaces[1] == workspaces[4]
    assert len(set(workspaces)) == 3


def test_errors_say_what_was_asked(products, cublas):
    a, b = operands([(2, 3), (4, 2)], "ef")
    with pytest.raises(
        ValueError, match=r"float16 \(2, 3\) and float32 \(4, 2\): the first has 3"
    ):
        products.matmul(a, b)
    with pytest.raises(ValueError, match=r"tensordot: shapes \(2, 3\) and \(4, 2\) differ"):
        products.tensordot(a, b, 1)
    for axes in (3, (2, 0)):
        with pytest.raises(ValueError):
            products.tensordot(a, b, axes)
    with pytest.raises(ValueError, match="at least one axis"):
        products.dot(a, np.float32(1))
    for dtype in ("b", "?", "F"):
        assert not can_multiply(dtype)
        with pytest.raises(TypeError, match="expected float16, float32 or float64"):
            products.matmul(a.astype(dtype), b.astype(dtype))
    huge = np.lib.stride_tricks.as_strided(b, (1, 2**31), (4, 4))
    with pytest.raises(ValueError, match="too large, as cuBLAS counts up to 2147483647"):
        products.matmul(huge, huge.T)


def test_a_failure_names_what_was_asked_and_cublas_status(products, cublas):
    fails = ctypes.c_int.in_dll(cublas[0], "fails")
    a, b = operands([(2, 3), (3, 4)], "ff")
    fails.value = 1
    try:
        with pytest.raises(
            RuntimeError,
            match=r"float32 \(2, 3\) and float32 \(3, 4\): "
            "cublasGemmEx failed with CUBLAS_STATUS_INVALID_VALUE",
        ):
            products.matmul(a, b)
    finally:
        fails.value = 0
    check(products.matmul(a, b), a @ b, "f")
