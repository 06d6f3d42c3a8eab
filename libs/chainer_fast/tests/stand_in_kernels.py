"""Elementwise kernels of CuPy, compiled for the CPU, and arrays that pass for CuPy's."""

import ctypes
import functools
import inspect
from types import SimpleNamespace
from typing import ClassVar

import chainer
import numpy as np

C_TYPES = {
    "bool": "bool",
    "float16": "_Float16",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}


class Array(np.ndarray):
    """A NumPy array that passes for a CuPy array."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    def reduced_view(self):
        return np.ascontiguousarray(self).view(type(self))


def undo_repairs(monkeypatch):
    """Give Chainer's optimizers their own methods again."""
    for owner, names in {
        chainer.optimizer.GradientMethod: ["update", "reallocate_cleared_grads"],
        chainer.optimizer.Optimizer: ["check_nan_in_grads", "call_hook"],
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))


def to_gpu(array):
    return np.array(array).view(Array)


class Kernel:
    """An elementwise kernel with as much of CuPy's interface as the tests need.

    ``launches`` holds the names of all kernels launched so far.
    """

    launches: ClassVar = []

    def __init__(self, in_params, out_params, operation, name, preamble="", **options):
        self.in_params, self.out_params = _parse(in_params, True), _parse(out_params, False)
        self.params = (*self.in_params, *self.out_params, None)
        self.nin = len(self.in_params)
        self.operation, self.name, self.preamble, self.kwargs = operation, name, preamble, options

    def __call__(self, *args, size=None):
        for arg in args:
            if hasattr(arg, "__cupy_override_elementwise_kernel__"):
                return arg.__cupy_override_elementwise_kernel__(self, *args)
        self.launches.append(self.name)
        params, types = self.params[:-1], {}
        made = None
        if len(args) == self.nin < len(params):
            like = next(arg for arg in args if isinstance(arg, Array))
            made = np.empty_like(like)
            args = (*args, made)
        assert len(params) == len(args)
        for param, arg in zip(params, args, strict=True):
            if isinstance(arg, Array):
                dtype = types.setdefault(param.ctype, arg.dtype)
                assert arg.dtype == dtype == (param.dtype or dtype)
                if not param.raw:
                    size = arg.size if size is None else size
                    assert arg.size == size
        dtypes = [param.dtype or types[param.ctype] for param in params]
        given = [np.asarray(arg, dtype) for arg, dtype in zip(args, dtypes, strict=True)]
        steps = (ctypes.c_longlong * len(given))(*[isinstance(arg, Array) for arg in args])
        names = tuple((name, dtype.name) for name, dtype in types.items() if len(name) == 1)
        run = self.compiled(_source(self, names)).run

        def launch():
            arrays = [np.ascontiguousarray(array) for array in given]
            pointers = (ctypes.c_void_p * len(arrays))(*[each.ctypes.data for each in arrays])
            run(ctypes.c_longlong(size), pointers, steps)
            for mine, array in zip(arrays, given, strict=True):
                if not np.may_share_memory(mine, array):
                    array[...] = mine

        self.enqueue(launch, given)
        return made

    def enqueue(self, run, arrays):
        """Run the kernel, which uses these arrays."""
        run()


def _parse(text, is_const):
    found = []
    for param in text.split(",") if text else []:
        *keywords, type_, name = param.split()
        dtype = None if len(type_) == 1 else np.dtype(type_)
        ctype = type_ if dtype is None else C_TYPES[dtype.name]
        kind = {"raw": keywords == ["raw"], "is_const": is_const}
        found.append(SimpleNamespace(name=name, dtype=dtype, ctype=ctype, **kind))
    return tuple(found)


@functools.cache
def _source(kernel, types):
    """Return the kernel in C++ for these dtypes: a function of size, pointers and steps."""
    elements = [
        f"{param.ctype}* {param.name} = ({param.ctype}*)pointers[{k}];"
        if param.raw
        else f"{'const ' * param.is_const}{param.ctype}& {param.name} = "
        f"(({param.ctype}*)pointers[{k}])[i * steps[{k}]];"
        for k, param in enumerate(kernel.params[:-1])
    ]
    return "\n".join(
        [
            "#include <algorithm>\n#include <cmath>\nusing namespace std;",
            "static bool isfinite(_Float16 x) { return isfinite((float)x); }",
            "#define __device__ static",
            *(f"typedef {C_TYPES[dtype]} {name};" for name, dtype in types),
            kernel.preamble,
            'extern "C" void run(long long size, void** pointers, const long long* steps) {',
            "for (long long i = 0; i < size; ++i) {",
            *elements,
            f"{kernel.operation};\n}}\n}}",
        ]
    )
