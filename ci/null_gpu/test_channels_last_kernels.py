"""The kernels for channels-last images compile, and CuPy passes them to Chainer's functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.null_gpu import build

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

SCRIPT = """
import chainer, cupy, numpy as np
import chainer.functions as F
from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import the_kernels
from chainer_fast.repairs import reductions

reductions.reduce_by_kernels(F)
kernels, launched = the_kernels(), set()
make = cupy.RawKernel
cupy.RawKernel = lambda source, name, options: launched.add((name, options)) or make(
    source, name, options)

def lies_last(array):
    return layout.as_stored(array).flags.c_contiguous

for device, channels in ((0, 8), (0, 4), (0, 5), (1, 8)):
    with cupy.cuda.Device(device):
        x = chainer.Variable(layout.empty(cupy, (2, channels, 9, 9), np.dtype("e")))
        for y in (F.max_pooling_2d(x, 3, 2, 1), F.average_pooling_2d(x, (9, 9))):
            gy = chainer.Variable(cupy.ones_like(y.array))
            (gx,) = chainer.grad([y], [x], [gy], enable_double_backprop=True)
            (ggy,) = chainer.grad([gx], [gy])
            assert ggy.shape == y.shape
            assert all(lies_last(each.array) for each in (y, gx))
        y, indexes = F.max_pooling_2d(x, 3, 2, return_indices=True)
        assert (indexes.shape, indexes.dtype) == (y.shape, np.int32)
        assert F.sum(x, (0, 2, 3), keepdims=True).shape == (1, channels, 1, 1)
        kernels.add_bias(x.array, cupy.empty(channels, "e"))
        assert kernels.padded(cupy.empty((2, 3, 9, 9), "e"), channels).shape == x.shape
print(len(launched))
"""


def test_kernels_compile_for_any_number_of_channels() -> None:
    program = str(Path(__file__).resolve().parent)
    command = [sys.executable, program, sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kernels, numbers_of_lanes = 8, 3
    assert int(done.stdout) == kernels * numbers_of_lanes
