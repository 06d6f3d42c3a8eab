"""Nets with other functions than ResNet-50 stay channels last, and so do their gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.null_gpu import build

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

# Only these get images of another order: from Linear, which has none.
AFTER_LINEAR = {
    "Vgg": ["DropoutGrad"],
    "GoogLeNet": [],
    "Gan": ["Convolution2DGradW", "Deconvolution2DFunction", "_LeakyReLUGrad"],
}
SCRIPT = '''
import json
import chainer, cupy, numpy as np
import chainer.functions as F, chainer.links as L
from chainer_fast.channels_last import layout

chainer.global_config.dtype = chainer.mixed16
device = chainer.get_device("@cupy:0")
device.use()

class Order(chainer.FunctionHook):
    """Counts images and filters, and notes functions that get them in another order."""

    def __init__(self):
        self.others, self.n_seen = set(), 0

    def forward_postprocess(self, function, in_data):
        for array in in_data:
            # Pictures have 3 channels, in Chainer's order.
            if array is not None and array.ndim == 4 and array.shape[1] > 3:
                self.n_seen += 1
                # Views of some channels have gaps.
                is_last = array.strides[1] == array.itemsize
                if not is_last and not layout.flat(array).flags.c_contiguous:
                    self.others.add(function.label)

class Vgg(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Convolution2D(3, 8, 3, pad=1)
            self.b = L.Convolution2D(8, 16, 3, pad=1)
            self.out = L.Linear(None, 4)

    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(x))))
        return self.out(F.dropout(F.max_pooling_2d(x, 2)))

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

x = cupy.zeros((2, 3, 8, 8), "e")
t = cupy.zeros(2, "i")
seen = {}
for kind in (Vgg, GoogLeNet, Gan):
    model = kind()
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    optimizer.use_fp32_update()
    optimizer.loss_scaling()
    step = lambda: F.softmax_cross_entropy(model(x), t)
    optimizer.update(step)
    with Order() as order:
        optimizer.update(step)
    filters = [p for p in model.params() if p.array.ndim == 4]
    arrays = [array for p in filters for array in (p.array, p.grad)]
    assert all(layout.flat(array).flags.c_contiguous for array in arrays)
    seen[kind.__name__] = order.n_seen, sorted(order.others)
print(json.dumps(seen))
'''


def test_nothing_between_convolutions_undoes_the_layout() -> None:
    program = Path(__file__).resolve().parent
    command = [sys.executable, str(program), sys.executable, "-c", SCRIPT]
    path = os.pathsep.join(filter(None, (str(program / "cudnn"), os.environ.get("PYTHONPATH"))))
    asked = {"CHAINER_COMPAT_CUDNN": "1", "CHAINER_CHANNELS_LAST": "1", "PYTHONPATH": path}
    environment = {**os.environ, **asked}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {name: others for name, (_, others) in seen.items()} == AFTER_LINEAR
    assert all(n_seen > 10 for n_seen, _ in seen.values())
