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
from chainer_fast.channels_last.layout import is_channels_last
import models


class Watch(chainer.FunctionHook):
    # Functions that read images in another order.
    def __init__(self):
        super().__init__()
        self.found = set()

    def look(self, function, arrays):
        for array in arrays:
            if getattr(array, "ndim", 0) == 4 and min(array.shape[1], array[0, 0].size) > 1:
                if not is_channels_last(array):
                    self.found.add((type(function).__name__, array.shape[1]))

    def forward_preprocess(self, function, in_data):
        self.look(function, in_data)

    def backward_preprocess(self, function, in_data, out_grad):
        self.look(function, out_grad)


def train(arch, size):
    model = chainer.links.Classifier(models.ARCHITECTURES[arch](10))
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
    graphs = optimizer.cuda_graphs
    return graphs.n_launched, graphs.n_fused, sorted(watch.found)


device = chainer.get_device("@cupy:0")
device.use()
chainer.global_config.dtype = chainer.mixed16
print(json.dumps([train("resnet50", 64), train("small", 64)]))
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
    resnet, small = json.loads(done.stdout)
    images = [["Convolution2DFunction", 3], ["Convolution2DGradW", 3]]
    # The gradient of the mean over rows and columns is the only one in Chainer's order.
    assert resnet == [3, 49, sorted([*images, ["ReLU", 2048], ["ReLUGrad2", 2048]])]
    assert small == [3, 4, sorted([*images, ["ReLU", 128], ["ReLUGrad2", 128]])]
    of_captures = waits.read(tmp_path).in_captures()
    assert not {each.call for each in of_captures} - {"cudaMalloc", "cudaHostAlloc"}
