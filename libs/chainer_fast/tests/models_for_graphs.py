"""Models for steps with CUDA graphs.

They have all links of the apps, except `NStepLSTM`, which uploads addresses in each step.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Perceptron(chainer.Chain):
    """Normalized layers with dropout."""

    def __init__(self, ratio=0.5):
        super().__init__()
        self.ratio = ratio
        with self.init_scope():
            self.first = L.Linear(12, 24)
            self.normalize = L.BatchNormalization(24)
            self.last = L.Linear(24, 5)

    def forward(self, x):
        h = F.relu(self.normalize(self.first(x)))
        return self.last(F.dropout(h, self.ratio))


class Plain(chainer.Chain):
    """Two layers whose gradients are never nearly zero, as all optimizers need them."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.last = L.Linear(12, 24), L.Linear(24, 5)

    def forward(self, x):
        return self.last(F.tanh(self.first(x)))


class Images(chainer.Chain):
    """Convolutions in both directions, poolings and normalization."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.normalize = L.BatchNormalization(8)
            self.double = L.Deconvolution2D(8, 4, 4, 2, 1, nobias=True)
            self.last = L.Linear(4, 5)

    def forward(self, x):
        h = F.leaky_relu(self.normalize(self.first(x)), 0.2)
        h = F.tanh(self.double(F.max_pooling_2d(h, 3, 2)))
        return self.last(F.mean(F.average_pooling_2d(h, 2), axis=(2, 3)))


class Inception(chainer.Chain):
    """Networks in networks."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.network = L.MLPConvolution2D(3, (8, 8), 1)
            self.inception = L.Inception(8, 4, 4, 4, 4, 4, 4)
            self.normalized = L.InceptionBN(16, 4, 4, 4, 4, 4, "avg", 4)
            self.last = L.Linear(16, 5)

    def forward(self, x):
        h = F.local_response_normalization(self.network(x))
        h = self.normalized(self.inception(h))
        return self.last(F.reshape(F.average_pooling_2d(h, h.shape[2:]), (len(x), -1)))


class Words(chainer.Chain):
    """Embeddings, an LSTM and attention."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(11, 8, ignore_label=-1)
            self.step = L.LSTM(8, 8)
            self.normalize = L.LayerNormalization(8)
            self.project = L.Linear(8, 16, nobias=True)
            self.last = L.Linear(8, 5)

    def forward(self, x):
        self.step.reset_state()
        steps = [self.step(each) for each in F.separate(F.dropout(self.embed(x), 0.1), 1)]
        memory, h = F.stack(steps, 1), steps[-1]
        keys, values = F.split_axis(self.project(memory, n_batch_axes=2), 2, 2)
        energies = F.matmul(F.expand_dims(h, 1), F.transpose(keys, (0, 2, 1)))
        values = F.matmul(F.softmax(energies, axis=2), values)
        h = F.reshape(values, h.shape) + F.broadcast_to(F.mean(h, axis=0), h.shape)
        return F.log_softmax(self.last(self.normalize(h)))


class Half(chainer.Chain):
    """Layers in float16."""

    def __init__(self):
        super().__init__()
        with chainer.using_config("dtype", chainer.mixed16), self.init_scope():
            self.first, self.last = L.Linear(12, 24), L.Linear(24, 5)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


def batches(model, n_steps, size=6):
    """Return inputs and labels for each step, in host memory."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(n_steps):
        if isinstance(model, Words):
            x = random.integers(0, 11, (size, 5)).astype("i")
        else:
            shape = (3, 16, 16) if isinstance(model, (Images, Inception)) else (12,)
            dtype = "e" if isinstance(model, Half) else "f"
            x = random.normal(size=(size, *shape)).astype(dtype)
        found.append((x, random.integers(0, 5, size).astype("i")))
    return found


OPTIMIZERS = {
    "SGD": lambda: chainer.optimizers.SGD(0.01),
    "MomentumSGD": chainer.optimizers.MomentumSGD,
    "CorrectedMomentumSGD": chainer.optimizers.CorrectedMomentumSGD,
    "NesterovAG": chainer.optimizers.NesterovAG,
    "Adam": chainer.optimizers.Adam,
    "AdamW": lambda: chainer.optimizers.Adam(weight_decay_rate=0.01),
    "AMSGrad": lambda: chainer.optimizers.Adam(amsgrad=True),
    "AdaBound": lambda: chainer.optimizers.Adam(adabound=True),
    "AdaDelta": chainer.optimizers.AdaDelta,
    "AdaGrad": chainer.optimizers.AdaGrad,
    "RMSprop": lambda: chainer.optimizers.RMSprop(0.001),
    "RMSpropGraves": chainer.optimizers.RMSpropGraves,
    "SMORMS3": chainer.optimizers.SMORMS3,
}
