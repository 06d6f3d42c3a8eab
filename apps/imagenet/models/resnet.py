"""ResNet-50, -101 and -152: He, Zhang, Ren and Sun, CVPR 2016."""

from typing import ClassVar

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L
from chainer.serializers import NpzDeserializer


class ResNet50(chainer.Chain):
    """Sixteen blocks of three convolutions and a shortcut, which compute as in torchvision.

    The last scale of each block starts at zero, so that at first a block passes its input on
    (Goyal et al., 2017).
    """

    insize = 224
    blocks: ClassVar = (3, 4, 6, 3)
    as_in_chainer = False

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        he, bias = I.HeNormal(), self.as_in_chainer
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, 2, 3, nobias=not bias, initialW=he)
            self.bn1 = L.BatchNormalization(64)
            n_in = 64
            for number, n in enumerate(self.blocks):
                stage = chainer.ChainList()
                for block in range(n):
                    stride = 2 if number > 0 and block == 0 else 1
                    stage.append(
                        Bottleneck(n_in, 64 << number, stride, block == 0, self.as_in_chainer)
                    )
                    n_in = 256 << number
                setattr(self, f"res{number + 2}", stage)
            self.fc = L.Linear(n_in, n_out, initialW=I.Normal(0.01))
        for link in self.links():
            if isinstance(link, L.BatchNormalization):
                link.eps = 2e-5 if self.as_in_chainer else 1e-5

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.relu(self.bn1(self.conv1(x)))
        if self.as_in_chainer:
            h = F.max_pooling_2d(h, 3, 2)
        else:
            h = F.max_pooling_2d(h, 3, 2, pad=1, cover_all=False)
        for stage in (self.res2, self.res3, self.res4, self.res5):
            for block in stage:
                h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the weights; those of a network that computes differently are refused."""
        is_loaded = isinstance(serializer, NpzDeserializer) and not self.as_in_chainer
        # Chainer would leave this array out.
        if is_loaded and f"{serializer.path}conv1/b" in serializer.npz:
            raise ValueError(
                "conv1/b shows a ResNet-50 that computes as in Chainer's example, as all did in "
                "earlier versions: resume it with that version, or begin a new training with "
                "--initmodel model.npz of that one and another --out"
            )
        super().serialize(serializer)


class ResNet101(ResNet50):
    """Thirty-three blocks."""

    blocks = (3, 4, 23, 3)


class ResNet152(ResNet50):
    """Fifty blocks."""

    blocks = (3, 8, 36, 3)


class ChainersResNet50(ResNet50):
    """ResNet-50 as in Chainer's ImageNet example, for weights that were trained with it.

    A stage is made smaller by its first convolution of 1x1 pixels, pooling reaches beyond the
    right and lower margins only, the first convolution has a bias, and eps is 2e-5.
    """

    as_in_chainer = True


class Bottleneck(chainer.Chain):
    """Convolutions of 1x1, 3x3 and 1x1 pixels, to which the input is added.

    Parameters
    ----------
    n_in, inner : int
        Channels of the input and of the 3x3 convolution; the output has four times as many.
    stride : int
        Stride of the 3x3 convolution.
    projection : bool
        Whether to add a 1x1 convolution of the input instead.
    stride_first : bool
        Whether the first convolution has the stride, as in the paper.
    """

    def __init__(
        self, n_in: int, inner: int, stride: int, projection: bool, stride_first: bool
    ) -> None:
        super().__init__()
        outer, (first, second) = 4 * inner, (stride, 1) if stride_first else (1, stride)
        self.projection = projection
        with self.init_scope():
            self.conv1 = convolution(n_in, inner, 1, first)
            self.bn1 = L.BatchNormalization(inner)
            self.conv2 = convolution(inner, inner, 3, second)
            self.bn2 = L.BatchNormalization(inner)
            self.conv3 = convolution(inner, outer, 1)
            self.bn3 = L.BatchNormalization(outer, initial_gamma=0)
            if projection:
                self.conv4 = convolution(n_in, outer, 1, stride)
                self.bn4 = L.BatchNormalization(outer)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the output, of shape (batch, 4 * inner, height / stride, width / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return F.relu(h + (self.bn4(self.conv4(x)) if self.projection else x))


def convolution(n_in: int, n_out: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    """Return a convolution without bias, which batch normalization would cancel."""
    he = I.HeNormal(fan_option="fan_out")
    pad = ksize // 2
    return L.Convolution2D(n_in, n_out, ksize, stride, pad, nobias=True, initialW=he)
