"""Inception with batch normalization: Ioffe and Szegedy, ICML 2015."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

# Channels: input, 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3; pooling, its projection and
# the stride. They are those of figure 5 of the paper except in 4c and 4d, whose paths add up to
# more there than the 576 channels that it says they have. Without a projection a module passes
# on the pooled input, and it has no 1x1 convolution.
INCEPTIONS = {
    "3a": (192, 64, 64, 64, 64, 96, "avg", 32),
    "3b": (256, 64, 64, 96, 64, 96, "avg", 64),
    "3c": (320, 0, 128, 160, 64, 96, "max", None, 2),
    "4a": (576, 224, 64, 96, 96, 128, "avg", 128),
    "4b": (576, 192, 96, 128, 96, 128, "avg", 128),
    "4c": (576, 128, 128, 160, 128, 160, "avg", 128),
    "4d": (576, 64, 128, 192, 160, 192, "avg", 128),
    "4e": (576, 0, 128, 192, 192, 256, "max", None, 2),
    "5a": (1024, 352, 192, 320, 160, 224, "avg", 128),
    "5b": (1024, 352, 192, 320, 192, 224, "max", 128),
}


class GoogLeNetBN(chainer.Chain):
    """Ten Inception modules without 5x5 convolutions, and two auxiliary classifiers."""

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, stride=2, pad=3, nobias=True)
            self.norm1 = L.BatchNormalization(64)
            self.conv2 = L.Convolution2D(64, 192, 3, pad=1, nobias=True)
            self.norm2 = L.BatchNormalization(192)
            for name, arguments in INCEPTIONS.items():
                # float32 even where everything else is float16, like other batch normalization.
                setattr(self, f"inc{name}", L.InceptionBN(*arguments, dtype=np.float32))
            self.out = L.Linear(1024, n_out)
            for name in "ab":
                setattr(self, f"conv{name}", L.Convolution2D(576, 128, 1, nobias=True))
                setattr(self, f"norm{name}", L.BatchNormalization(128))
                setattr(self, f"lin{name}", L.Linear(128 * 4 * 4, 1024, nobias=True))
                setattr(self, f"norm{name}2", L.BatchNormalization(1024))
                setattr(self, f"out{name}", L.Linear(1024, n_out))

    def forward(self, x: chainer.Variable) -> chainer.Variable | tuple[chainer.Variable, ...]:
        """Return the scores of the classes; see the package."""
        h = F.max_pooling_2d(F.relu(self.norm1(self.conv1(x))), 3, stride=2, pad=1)
        h = F.max_pooling_2d(F.relu(self.norm2(self.conv2(h))), 3, stride=2, pad=1)
        h = after_4a = self.inc4a(self.inc3c(self.inc3b(self.inc3a(h))))
        h = after_4d = self.inc4d(self.inc4c(self.inc4b(h)))
        h = self.inc5b(self.inc5a(self.inc4e(h)))
        # The pictures have 8x8 pixels here: the example leaves out the last row and column.
        scores = self.out(F.average_pooling_2d(h, 7))
        if not chainer.config.train:
            return scores
        return scores, self._auxiliary("a", after_4a), self._auxiliary("b", after_4d)

    def _auxiliary(self, name: str, h: chainer.Variable) -> chainer.Variable:
        """Return the scores of a classifier in the middle of the network."""
        h = self[f"conv{name}"](F.average_pooling_2d(h, 5, stride=3))
        h = self[f"lin{name}"](F.relu(self[f"norm{name}"](h)))
        return self[f"out{name}"](F.relu(self[f"norm{name}2"](h)))
