"""VGG-16, configuration D of Simonyan and Zisserman, ICLR 2015."""

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L

# Channels of the convolutions, all of 3x3 pixels, between one pooling and the next.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(chainer.Chain):
    """Thirteen convolutions and three fully connected layers."""

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        # The paper had to train smaller networks first; with He's initialization, that is not
        # needed.
        channels, he = 3, I.HeNormal()
        with self.init_scope():
            self.stages = chainer.ChainList()
            for stage in STAGES:
                convolutions = chainer.ChainList()
                for width in stage:
                    convolutions.append(L.Convolution2D(channels, width, 3, pad=1, initialW=he))
                    channels = width
                self.stages.append(convolutions)
            self.fc6 = L.Linear(None, 4096)
            self.fc7 = L.Linear(4096, 4096)
            self.fc8 = L.Linear(4096, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = x
        for stage in self.stages:
            for convolution in stage:
                h = F.relu(convolution(h))
            h = F.max_pooling_2d(h, 2)
        h = F.dropout(F.relu(self.fc6(h)))
        h = F.dropout(F.relu(self.fc7(h)))
        return self.fc8(h)
