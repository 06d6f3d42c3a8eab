"""A network for images of 48x48 pixels, which two cores train in a minute."""

import chainer
import chainer.functions as F
import chainer.links as L


class Small(chainer.Chain):
    """Four convolutions with batch normalization, then the mean over the picture."""

    insize = 48

    def __init__(self, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 16, 3, stride=2, pad=1, nobias=True)
            self.bn1 = L.BatchNormalization(16)
            self.conv2 = L.Convolution2D(16, 32, 3, pad=1, nobias=True)
            self.bn2 = L.BatchNormalization(32)
            self.conv3 = L.Convolution2D(32, 64, 3, pad=1, nobias=True)
            self.bn3 = L.BatchNormalization(64)
            self.conv4 = L.Convolution2D(64, 128, 3, pad=1, nobias=True)
            self.bn4 = L.BatchNormalization(128)
            self.fc = L.Linear(128, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.max_pooling_2d(F.relu(self.bn2(self.conv2(h))), 2)
        h = F.max_pooling_2d(F.relu(self.bn3(self.conv3(h))), 2)
        h = F.relu(self.bn4(self.conv4(h)))
        return self.fc(F.mean(h, axis=(2, 3)))
