"""ResNet-50: He, Zhang, Ren and Sun, CVPR 2016."""

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L

# Of each stage: blocks, channels inside a block, channels that it puts out.
STAGES = ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048))


class ResNet50(chainer.Chain):
    """Sixteen blocks of three convolutions and a shortcut.

    A block that halves the picture does so in its 3x3 convolution, as most do it today, and not
    in the first as in the paper. The last scale of each block starts at zero, so that at first
    a block passes on what it is given (Goyal et al., 2017).

    Parameters
    ----------
    n_out : int
        Number of classes.
    """

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = convolution(3, 64, 7, stride=2)
            self.bn1 = L.BatchNormalization(64)
            self.blocks = chainer.ChainList()
            self.fc = L.Linear(2048, n_out, initialW=I.Normal(0.01))
        channels = 64
        for stage, (blocks, inner, outer) in enumerate(STAGES):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(Bottleneck(channels, inner, outer, stride))
                channels = outer

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.max_pooling_2d(h, 3, stride=2, pad=1, cover_all=False)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


class Bottleneck(chainer.Chain):
    """Convolutions of 1x1, 3x3 and 1x1 pixels, to which the input is added.

    Parameters
    ----------
    n_in, inner, outer : int
        Channels of the input, of the 3x3 convolution, of the output.
    stride : int
    """

    def __init__(self, n_in: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = convolution(n_in, inner, 1)
            self.bn1 = L.BatchNormalization(inner)
            self.conv2 = convolution(inner, inner, 3, stride)
            self.bn2 = L.BatchNormalization(inner)
            self.conv3 = convolution(inner, outer, 1)
            self.bn3 = L.BatchNormalization(outer, initial_gamma=0)
            if n_in != outer:
                self.shortcut = convolution(n_in, outer, 1, stride)
                self.shortcut_bn = L.BatchNormalization(outer)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the output, of shape (batch, outer, height / stride, width / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        if hasattr(self, "shortcut"):
            x = self.shortcut_bn(self.shortcut(x))
        return F.relu(h + x)


def convolution(n_in: int, n_out: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    """Return a convolution without bias, which batch normalization would take away."""
    he = I.HeNormal(fan_option="fan_out")
    pad = ksize // 2
    return L.Convolution2D(n_in, n_out, ksize, stride, pad, nobias=True, initialW=he)
