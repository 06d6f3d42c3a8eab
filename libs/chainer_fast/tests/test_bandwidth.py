"""Kernels that move 16 bytes at a time: compiled as C++, and run on arrays in host memory."""

import ctypes
import re
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda

from chainer_fast.repairs import bandwidth

C_TYPES = {"float32": "float", "float16": "_Float16"}
SHAPE = (3, 64, 57, 64)  # more than WORTHWHILE_BYTES, even in float16


class HostArray(np.ndarray):
    """A NumPy array with its address where CuPy's arrays have theirs."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Own:
    """A Chainer function without the repair."""

    def forward_gpu(self, inputs):
        return "Chainer's"

    forward = forward_gpu

    def retain_outputs(self, indexes):
        self.retained = indexes


def aligned(values, dtype, offset=0):
    """Return values at an address that is a multiple of 16, or ``offset`` elements after it."""
    values = np.asarray(values, dtype)
    room = np.empty(values.size + 16, dtype)
    start = -room.ctypes.data % 16 // values.itemsize + offset
    array = room[start : start + values.size].reshape(values.shape).view(HostArray)
    array[...] = values
    return array


@pytest.fixture
def launched(monkeypatch, compiled):
    """Run kernels on the CPU; return a list that records their names."""
    names = []

    def elementwise(in_params, out_params, operation, name, preamble):
        names.append(name)
        inputs = re.findall(r"raw T (\w+)", in_params)

        def run(*arrays, size):
            c_type = C_TYPES[arrays[0].dtype.name]
            arguments = ", ".join(f"T *{each}" for each in (*inputs, "y"))
            source = (
                f"using T = {c_type};\n{preamble}\n"
                f'extern "C" void run({arguments}, long size) {{\n'
                f"for (long i = 0; i < size; ++i) {{ {operation} }} }}\n"
            )
            pointers = [ctypes.c_void_p(array.data.ptr) for array in arrays]
            compiled(source).run(*pointers, ctypes.c_long(size))

        return run

    in_host_memory = SimpleNamespace(empty=lambda shape, dtype: aligned(np.ones(shape), dtype))
    for name, value in (
        ("elementwise", elementwise),
        ("cupy", in_host_memory),
        ("ndarray", HostArray),
    ):
        monkeypatch.setattr(cuda, name, value)
    return names


@pytest.fixture
def repaired():
    """Return a module with ReLU, its gradient and addition, all repaired."""
    names = ("ReLU", "ReLUGrad2", "Add")
    module = SimpleNamespace(**{name: type(name, (Own,), {}) for name in names})
    bandwidth.relu_at_full_bandwidth(module)
    bandwidth.add_at_full_bandwidth(module)
    return module


def draw(dtype):
    random = np.random.default_rng(0)
    first, second = (aligned(random.normal(size=SHAPE), dtype) for _ in range(2))
    first.ravel()[:5] = 0.0, -0.0, np.inf, -np.inf, np.nan
    return first, second


@pytest.mark.parametrize("dtype", C_TYPES)
def test_results_are_those_of_numpy(dtype, launched, repaired):
    x, gy = draw(dtype)
    relu = repaired.ReLU()
    gradient = repaired.ReLUGrad2()
    gradient.b = x
    np.testing.assert_array_equal(relu.forward_gpu((x,))[0], np.maximum(x, 0))
    np.testing.assert_array_equal(gradient.forward_gpu((gy,))[0], np.where(x > 0, gy, 0))
    np.testing.assert_array_equal(repaired.Add().forward((x, gy))[0], x + gy)
    assert launched == [
        "chainer_fast_relu",
        "chainer_fast_relu_gradient",
        "chainer_fast_add",
    ]
    assert relu.retained == (0,)


NARROW = {
    "few": lambda x: x[:1],
    "not aligned": lambda x: aligned(x, x.dtype, offset=1),
    "with gaps": lambda x: x[:, ::2],
    "float64": lambda x: aligned(x, "f8"),
    "a rest": lambda x: aligned(x.ravel()[:-1], x.dtype),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_is_left_to_chainer(name, launched, repaired):
    x = NARROW[name](draw("float16")[0])
    gradient = repaired.ReLUGrad2()
    gradient.b = x
    assert repaired.ReLU().forward_gpu((x,)) == "Chainer's"
    assert gradient.forward_gpu((x,)) == "Chainer's"
    assert repaired.Add().forward((x, x)) == "Chainer's"


def test_what_is_not_alike_is_left_to_chainer(launched, repaired):
    x, other = draw("float16")[0], draw("float32")[0]
    gradient = repaired.ReLUGrad2()
    for b in (other, x[:2], x[:, :1]):
        gradient.b = b
        assert gradient.forward_gpu((x,)) == "Chainer's"
        assert repaired.Add().forward((x, b)) == "Chainer's"
    assert repaired.Add().forward((np.asarray(x), np.asarray(x))) == "Chainer's"
    assert launched == []


def test_in_host_memory_chainer_adds():
    x = np.ones(2**20, "f4")
    y = chainer.Variable(x) + chainer.Variable(x)
    assert (y.array == 2).all()
