"""Networks stay channels last from the first convolution to the loss, with the real CuPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.null_gpu import build, waits

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

ROOT = build.HERE.parents[1]

SCRIPT = """
import json, sys
sys.path.insert(0, "apps/imagenet")
import chainer, cupy, numpy as np
import chainer.functions as F, chainer.links as L
from chainer_fast.channels_last.layout import as_stored
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
                if not is_view and not as_stored(array).flags.c_contiguous:
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
    assert all(as_stored(array).flags.c_contiguous for p in filters for array in (p.array, p.grad))
    graphs = optimizer.cuda_graphs
    return graphs.n_launched, graphs.n_fused, sorted(watch.found)


device = chainer.get_device("@cupy:0")
device.use()
chainer.global_config.dtype = chainer.mixed16
found = [train(models.ARCHITECTURES[name](10), 64) for name in ("resnet50", "small")]
print(json.dumps([*found, train(GoogLeNet(), 8), train(Gan(), 8)]))
"""


def test_networks_are_channels_last_and_recorded_with_fused_kernels(tmp_path: Path) -> None:
    environment = build.environment(1, tmp_path)
    path = os.pathsep.join([str(build.HERE / "cudnn"), environment["PYTHONPATH"]])
    asked = {"CHAINER_COMPAT_CUDNN": "1", "CHAINER_CHANNELS_LAST": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**environment, **asked},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    resnet, small, inception, gan = json.loads(done.stdout)
    images = [["Convolution2DFunction", 3], ["Convolution2DGradW", 3]]
    assert resnet == [3, 49, images]
    assert small == [3, 4, images]
    assert inception == [3, 0, images]
    # Only beside Linear, which knows no images.
    first = [["Convolution2DGradW", 8], ["Deconvolution2DFunction", 8]]
    assert gan == [3, 1, [*first, ["LeakyReLU", 16], ["_LeakyReLUGrad", 16]]]
    of_captures = waits.read(tmp_path).in_captures()
    assert not {each.call for each in of_captures} - {"cudaMalloc", "cudaHostAlloc"}
