"""ResNet-50: He, Zhang, Ren and Sun, CVPR 2016."""

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L


class ResNet50(chainer.Chain):
    """Sixteen blocks of three convolutions and a shortcut.

    The last scale of each block starts at zero, so that at first a block passes its input on
    (Goyal et al., 2017).
    """

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, stride=2, pad=3, initialW=I.HeNormal())
            self.bn1 = L.BatchNormalization(64)
            self.res2 = blocks(3, 64, 64, 256, stride=1)
            self.res3 = blocks(4, 256, 128, 512, stride=2)
            self.res4 = blocks(6, 512, 256, 1024, stride=2)
            self.res5 = blocks(3, 1024, 512, 2048, stride=2)
            self.fc = L.Linear(2048, n_out, initialW=I.Normal(0.01))

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.max_pooling_2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2)
        for stage in (self.res2, self.res3, self.res4, self.res5):
            for block in stage:
                h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


def blocks(n: int, n_in: int, inner: int, outer: int, stride: int) -> chainer.ChainList:
    """Return blocks; the first one changes the size and the number of channels."""
    others = [Bottleneck(outer, inner, outer) for _ in range(n - 1)]
    return chainer.ChainList(Bottleneck(n_in, inner, outer, stride, projection=True), *others)


class Bottleneck(chainer.Chain):
    """Convolutions of 1x1, 3x3 and 1x1 pixels, to which the input is added.

    Parameters
    ----------
    n_in, inner, outer : int
        Channels of the input, of the 3x3 convolution, of the output.
    stride : int
        Stride of the first convolution, as in the paper.
    projection : bool
        Whether to add a 1x1 convolution of the input instead.
    """

    def __init__(
        self, n_in: int, inner: int, outer: int, stride: int = 1, projection: bool = False
    ) -> None:
        super().__init__()
        self.projection = projection
        with self.init_scope():
            self.conv1 = convolution(n_in, inner, 1, stride)
            self.bn1 = L.BatchNormalization(inner)
            self.conv2 = convolution(inner, inner, 3)
            self.bn2 = L.BatchNormalization(inner)
            self.conv3 = convolution(inner, outer, 1)
            self.bn3 = L.BatchNormalization(outer, initial_gamma=0)
            if projection:
                self.conv4 = convolution(n_in, outer, 1, stride)
                self.bn4 = L.BatchNormalization(outer)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the output, of shape (batch, outer, height / stride, width / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + (self.bn4(self.conv4(x)) if self.projection else x))


def convolution(n_in: int, n_out: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    """Return a convolution without bias, which batch normalization would cancel."""
    he = I.HeNormal(fan_option="fan_out")
    pad = ksize // 2
    return L.Convolution2D(n_in, n_out, ksize, stride, pad, nobias=True, initialW=he)
