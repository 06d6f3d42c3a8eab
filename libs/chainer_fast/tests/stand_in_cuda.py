"""CuPy's kernels of CUDA source, compiled for the CPU, and arrays that pass for CuPy's."""

import ctypes
import re
from pathlib import Path

import numpy as np

from libs.chainer_fast.tests.stand_in_kernels import Array

HEADER = Path(__file__).with_name("stand_in_cuda.h")


class Cupy:
    """As much of CuPy as the kernels need. It finds a C++ compiler by the fixture ``compiled``.

    ``launches`` holds the names of all kernels launched so far, their options, and their grids.
    """

    ndarray = Array
    arange = np.arange

    def __init__(self, compiled):
        self._compiled, self.launches = compiled, []

    @staticmethod
    def empty(shape, dtype):
        # As float16, NaN: whoever reads or leaves what no kernel has written is found out.
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = 0x7E
        return array.view(Array)

    @staticmethod
    def where(*arrays):
        return np.where(*arrays).view(Array)

    @staticmethod
    def broadcast_to(array, shape):
        return np.broadcast_to(array, shape, subok=True)

    @staticmethod
    def ascontiguousarray(array):
        return np.ascontiguousarray(array).view(Array)

    def RawKernel(self, source, name, options):
        defined = [f"#define {each[2:].replace('=', ' ')}" for each in options if each[:2] == "-D"]
        source = source.replace("#include <cuda_fp16.h>", f'#include "{HEADER}"')
        names = re.findall(r'extern "C" __global__ void (\w+)', source)
        starters = [
            f'extern "C" void launch_{each}(Size grid, Size block, void** arguments)'
            f" {{ launch({each}, grid, block, arguments); }}"
            for each in names
        ]
        library = self._compiled("\n".join([*defined, source, *starters]))
        function = getattr(library, f"launch_{name}")
        function.argtypes = [_Size, _Size, ctypes.c_void_p]

        def launch(grid, block, args):
            self.launches.append((name, defined, grid))
            given = [
                np.array(arg.ctypes.data) if isinstance(arg, Array) else np.asarray(arg)
                for arg in args
            ]
            pointers = (ctypes.c_void_p * len(given))(*[each.ctypes.data for each in given])
            function(_Size(*grid), _Size(*block), pointers)

        return launch


class _Size(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))

    def __init__(self, x, y=1):
        super().__init__(x, y)
