"""Filters that lie channels last, by CuPy itself: strides, snapshots, what optimizers keep.

A stand-in for cuDNN computes, in the host memory that the null GPU has for a GPU's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.null_gpu import build

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

SCRIPT = """
import copy, pickle
import chainer, cupy, numpy as np
import chainer.functions as F, chainer.links as L
from chainer_fast.channels_last import layout

chainer.global_config.dtype = np.dtype("e")
device = chainer.get_device("@cupy:0")
device.use()

def make():
    link = L.Convolution2D(8, 16, 3, nobias=True)
    link.to_device(device)
    return link

def memory(array):
    assert layout.is_channels_last(array), array.strides
    return layout.as_shaped(layout.as_stored(array).get())  # CuPy's own copies need a kernel

random = np.random.RandomState(0)
values, w = (random.uniform(-1, 1, shape).astype("e") for shape in ((2, 8, 5, 5), (16, 8, 3, 3)))
x = layout.empty(cupy, values.shape, "e")
x.set(values)
expected = F.convolution_2d(values.astype("d"), w.astype("d")).array

def check(link):
    assert (memory(link.W.array) == w).all()
    np.testing.assert_allclose(memory(link(x).array), expected, atol=2e-2)

link = make()
assert link.W.array.flags.c_contiguous
link(x)
link.W.array.set(w)
check(link)

cpu = L.Convolution2D(8, 16, 3, nobias=True, initialW=w)
chainer.serializers.save_npz("link.npz", cpu)
dictionary = chainer.serializers.DictionarySerializer()
dictionary.save(cpu)
for load in (
    lambda link: chainer.serializers.load_npz("link.npz", link),
    lambda link: chainer.serializers.NpzDeserializer(dictionary.target).load(link),
):
    link = make()
    link(x)
    load(link)
    check(link)

for optimizer in (chainer.optimizers.Adam(), chainer.optimizers.MomentumSGD()):
    link = make()
    optimizer.setup(link).use_fp32_update()
    for _ in range(2):
        optimizer.update(lambda: F.sum(link(x)))
        rule = link.W.update_rule
        arrays = [link.W.array, link.W.grad, rule._fp32_param.array, *rule.state.values()]
        arrays = [array for array in arrays if np.ndim(array)]
        assert len(arrays) >= 4
        assert all(map(layout.is_channels_last, arrays))
    for found in (link.copy(), copy.deepcopy(link), pickle.loads(pickle.dumps(link))):
        assert found.W.shape == w.shape
        found(x)
        assert layout.is_channels_last(found.W.array)
    assert link.W.array.ravel().shape == (16 * 8 * 3 * 3,)
    link.to_device("@numpy")
    assert link.W.array.flags.c_contiguous
"""


def test_filters_by_cupy_itself(tmp_path: Path) -> None:
    program = Path(__file__).resolve().parent
    command = [sys.executable, str(program), sys.executable, "-c", SCRIPT]
    fake = str(program.parents[1] / "libs" / "chainer_fast" / "tests" / "fake_cudnn")
    path = os.pathsep.join(filter(None, (fake, os.environ.get("PYTHONPATH"))))
    asked = {"CHAINER_COMPAT_CUDNN": "1", "CHAINER_CHANNELS_LAST": "1", "PYTHONPATH": path}
    environment = {**os.environ, **asked}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
