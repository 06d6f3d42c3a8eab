"""In steps with CUDA graphs, CuPy's products call our cuBLAS, and dropout's kernels compile."""

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
from chainer_fast.graphs.drawing import Draws
from chainer_fast.matrix_products import Products

called = []
matmul = Products.matmul
Products.matmul = lambda *args: called.append(args[1].dtype.char) or matmul(*args)

def compute(dtype):
    a, v = cupy.ones((3, 3), dtype), cupy.ones(3, dtype)
    x = chainer.Variable(cupy.ones((2, 3, 4, 4), dtype))
    results = [a @ a, a.dot(v), v.dot(v), cupy.matmul(a, a), cupy.tensordot(a, a, 1)]
    results += [F.linear(a, a, v).array, F.einsum("ij,jk->ik", a, a).array]
    y = F.convolution_2d(x, cupy.ones((3, 3, 3, 3), dtype))
    results += [y.array, *F.dropout(x, return_mask=True)]
    return [array.dtype.char for array in results]

for step in (None, Draws(cupy.zeros(2, np.uint64)).step()):
    if step:
        step.__enter__()
    for dtype in "efd":
        assert compute(dtype) == [dtype] * 10
    print("".join(called))
"""


def test_products_and_dropout_by_cupy_itself() -> None:
    program = str(Path(__file__).resolve().parent)
    command = [sys.executable, program, sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "e" * 8 + "f" * 8 + "d" * 8]
