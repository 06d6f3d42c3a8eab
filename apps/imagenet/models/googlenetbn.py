"""Inception with batch normalization: Ioffe and Szegedy, ICML 2015."""

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L

# Channels, by the columns of figure 5 of the paper: input, 1x1, 3x3 reduce, 3x3, double 3x3
# reduce, double 3x3, pooling and its projection, stride. Without a projection, the module passes
# on the pooled input and has no 1x1 convolution.
INCEPTIONS = {
    "3a": (192, 64, 64, 64, 64, 96, "avg", 32, 1),
    "3b": (256, 64, 64, 96, 64, 96, "avg", 64, 1),
    "3c": (320, 0, 128, 160, 64, 96, "max", 0, 2),
    "4a": (576, 224, 64, 96, 96, 128, "avg", 128, 1),
    "4b": (576, 192, 96, 128, 96, 128, "avg", 128, 1),
    "4c": (576, 160, 128, 160, 128, 160, "avg", 128, 1),
    "4d": (608, 96, 128, 192, 160, 192, "avg", 128, 1),
    "4e": (608, 0, 128, 192, 192, 256, "max", 0, 2),
    "5a": (1056, 352, 192, 320, 160, 224, "avg", 128, 1),
    "5b": (1024, 352, 192, 320, 192, 224, "max", 128, 1),
}


class GoogLeNetBN(chainer.Chain):
    """Ten Inception modules without 5x5 convolutions, and no auxiliary classifiers.

    Parameters
    ----------
    n_out : int
        Number of classes.
    """

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = NormalizedConvolution(3, 64, 7, stride=2)
            self.conv2_reduce = NormalizedConvolution(64, 64, 1)
            self.conv2 = NormalizedConvolution(64, 192, 3)
            for name, arguments in INCEPTIONS.items():
                setattr(self, f"inception{name}", Inception(*arguments))
            self.fc = L.Linear(1024, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.max_pooling_2d(self.conv1(x), 3, stride=2, pad=1, cover_all=False)
        h = self.conv2(self.conv2_reduce(h))
        h = F.max_pooling_2d(h, 3, stride=2, pad=1, cover_all=False)
        for name in INCEPTIONS:
            h = self[f"inception{name}"](h)
        return self.fc(F.mean(h, axis=(2, 3)))


class Inception(chainer.Chain):
    """Up to four paths of convolutions, side by side; arguments as in ``INCEPTIONS``."""

    def __init__(
        self,
        n_in: int,
        out1: int,
        reduce3: int,
        out3: int,
        reduce33: int,
        out33: int,
        pool: str,
        projection: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.pool, self.stride = pool, stride
        with self.init_scope():
            if out1:
                self.conv1 = NormalizedConvolution(n_in, out1, 1)
            self.reduce3 = NormalizedConvolution(n_in, reduce3, 1)
            self.conv3 = NormalizedConvolution(reduce3, out3, 3, stride)
            self.reduce33 = NormalizedConvolution(n_in, reduce33, 1)
            self.conv33a = NormalizedConvolution(reduce33, out33, 3)
            self.conv33b = NormalizedConvolution(out33, out33, 3, stride)
            if projection:
                self.projection = NormalizedConvolution(n_in, projection, 1)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return what the paths make of ``x``, one behind the other along the channels."""
        paths = [
            self.conv3(self.reduce3(x)),
            self.conv33b(self.conv33a(self.reduce33(x))),
        ]
        if self.pool == "avg":
            pooled = F.average_pooling_2d(x, 3, self.stride, pad=1)
        else:
            pooled = F.max_pooling_2d(x, 3, self.stride, pad=1, cover_all=False)
        paths.append(self.projection(pooled) if hasattr(self, "projection") else pooled)
        if hasattr(self, "conv1"):
            paths.insert(0, self.conv1(x))
        return F.concat(paths)


class NormalizedConvolution(chainer.Chain):
    """Convolution, batch normalization and ReLU.

    Parameters
    ----------
    n_in, n_out, ksize, stride : int
        Of the convolution, which pads so that only the stride makes the picture smaller.
    """

    def __init__(self, n_in: int, n_out: int, ksize: int, stride: int = 1) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(
                n_in, n_out, ksize, stride, ksize // 2, nobias=True, initialW=I.HeNormal()
            )
            self.bn = L.BatchNormalization(n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return an array of shape (batch, n_out, height / stride, width / stride)."""
        return F.relu(self.bn(self.conv(x)))
