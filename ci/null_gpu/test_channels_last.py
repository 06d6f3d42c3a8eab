"""Channels last with the real CuPy: networks, filters and kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci.null_gpu import build, waits

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

ROOT = build.HERE.parents[1]
#: A cuDNN that does nothing, and one that computes in the host memory that passes for a GPU's.
NO_CUDNN, FAKE_CUDNN = build.HERE / "cudnn", ROOT / "libs/chainer_fast/tests/fake_cudnn"

START = """
import json
import chainer, cupy, numpy as np
import chainer.functions as F, chainer.links as L
from chainer_fast.channels_last import layout

device = chainer.get_device("@cupy:0")
device.use()
"""


def run(script: str, cudnn: Path, folder: Path) -> Any:
    """Run a script in a folder, and return what it prints."""
    environment = build.environment(2, folder)
    path = [str(cudnn), str(ROOT / "apps/imagenet"), environment["PYTHONPATH"]]
    asked = {"CHAINER_COMPAT_CUDNN": "1", "CHAINER_CHANNELS_LAST": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        cwd=folder,
        env={**environment, **asked, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


NETWORKS = """
import models


class Watch(chainer.FunctionHook):
    # Functions that read images in another order. Views of some channels have gaps.
    def __init__(self):
        super().__init__()
        self.found = set()

    def look(self, function, arrays):
        for array in arrays:
            if getattr(array, "ndim", 0) == 4 and min(array.shape[1], array[0, 0].size) > 1:
                is_view = array.strides[1] == array.itemsize
                if not is_view and not layout.as_stored(array).flags.c_contiguous:
                    self.found.add((type(function).__name__, array.shape[1]))

    def forward_preprocess(self, function, in_data):
        self.look(function, in_data)

    def backward_preprocess(self, function, in_data, out_grad):
        self.look(function, out_grad)


class GoogLeNet(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.a = L.Inception(8, 8, 8, 8, 8, 8, 8)
            self.b = L.Inception(32, 8, 8, 8, 8, 8, 8)

    def forward(self, x):
        x = self.b(self.a(F.relu(self.first(x))))
        return F.reshape(F.average_pooling_2d(x, x.shape[2:]), (len(x), -1))


class Gan(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.project = L.Linear(3 * 8 * 8, 8 * 4 * 4)
            self.double = L.Deconvolution2D(8, 16, 4, 2, 1, nobias=True)
            self.normalize = L.BatchNormalization(16)
            self.draw = L.Convolution2D(16, 3, 3, pad=1)
            self.look = L.Convolution2D(3, 8, 3, pad=1)
            self.halve = L.Convolution2D(8, 16, 4, 2, 1, nobias=True)
            self.again = L.BatchNormalization(16)
            self.judge = L.Linear(None, 4)

    def forward(self, x):
        x = F.reshape(self.project(x), (len(x), 8, 4, 4))
        x = F.tanh(self.draw(F.relu(self.normalize(self.double(x)))))
        x = F.leaky_relu(self.again(self.halve(F.leaky_relu(self.look(x)))))
        return self.judge(x)


def train(network, size):
    model = L.Classifier(network)
    model.compute_accuracy = False
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    optimizer.use_fp32_update()
    optimizer.loss_scaling()
    optimizer.use_cuda_graphs()
    x, t = cupy.zeros((2, 3, size, size), np.float16), cupy.zeros(2, np.int32)
    optimizer.update(model, x, t)
    with Watch() as watch:
        optimizer.update(model, x, t)
    for _ in range(8):
        optimizer.update(model, x, t)
    filters = [p for p in model.params() if p.array.ndim == 4]
    arrays = [array for p in filters for array in (p.array, p.grad)]
    assert all(layout.as_stored(array).flags.c_contiguous for array in arrays)
    graphs = optimizer.cuda_graphs
    return graphs.n_launched, graphs.n_fused, sorted(watch.found)


chainer.global_config.dtype = chainer.mixed16
found = [train(models.ARCHITECTURES[name](10), 64) for name in ("resnet50", "small")]
print(json.dumps([*found, train(GoogLeNet(), 8), train(Gan(), 8)]))
"""


def test_networks_are_channels_last_and_recorded_with_fused_kernels(tmp_path: Path) -> None:
    resnet, small, inception, gan = run(NETWORKS, NO_CUDNN, tmp_path)
    images = [["Convolution2DFunction", 3], ["Convolution2DGradW", 3]]
    assert resnet == [3, 49, images]
    assert small == [3, 4, images]
    assert inception == [3, 0, images]
    # Only beside Linear, which knows no images.
    first = [["Convolution2DGradW", 8], ["Deconvolution2DFunction", 8]]
    assert gan == [3, 1, [*first, ["LeakyReLU", 16], ["_LeakyReLUGrad", 16]]]
    of_captures = waits.read(tmp_path).in_captures()
    assert not {each.call for each in of_captures} - {"cudaMalloc", "cudaHostAlloc"}


FILTERS = """
import copy, pickle

chainer.global_config.dtype = np.dtype("e")

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
for wrong, error in ((values[:1], ValueError), (values.ravel(), ValueError),
                     (values.astype("d"), TypeError), ([1], TypeError)):
    try:
        x.set(wrong)
    except error:
        continue
    raise AssertionError(f"{wrong} was taken")
x.set(np.asfortranarray(values))
assert (memory(x) == values).all()
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


def test_filters(tmp_path: Path) -> None:
    """Strides, snapshots, and what optimizers keep."""
    run(FILTERS, FAKE_CUDNN, tmp_path)


KERNELS = """
from chainer_fast.channels_last.kernels import the_kernels

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
print(json.dumps(len(launched)))
"""


def test_kernels_compile_for_any_number_of_channels(tmp_path: Path) -> None:
    kernels, numbers_of_lanes = 8, 3
    assert run(KERNELS, NO_CUDNN, tmp_path) == kernels * numbers_of_lanes
