"""GoogLeNet: Szegedy et al., CVPR 2015."""

import chainer
import chainer.functions as F
import chainer.links as L

# Channels, by the columns of table 1 of the paper: input, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5,
# projection of the pooling.
INCEPTIONS = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


class GoogLeNet(chainer.Chain):
    """Nine Inception modules, and two auxiliary classifiers that only take part in training.

    Parameters
    ----------
    n_out : int
        Number of classes.
    """

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, stride=2, pad=3)
            self.conv2_reduce = L.Convolution2D(64, 64, 1)
            self.conv2 = L.Convolution2D(64, 192, 3, pad=1)
            for name, channels in INCEPTIONS.items():
                setattr(self, f"inception{name}", L.Inception(*channels))
            self.fc = L.Linear(1024, n_out)
            self.auxiliary1 = Auxiliary(512, n_out)
            self.auxiliary2 = Auxiliary(528, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable | tuple[chainer.Variable, ...]:
        """Return the scores of the classes; see the package."""
        h = F.max_pooling_2d(F.relu(self.conv1(x)), 3, stride=2)
        h = F.local_response_normalization(h, n=5)
        h = F.relu(self.conv2(F.relu(self.conv2_reduce(h))))
        h = F.max_pooling_2d(F.local_response_normalization(h, n=5), 3, stride=2)
        h = self.inception3b(self.inception3a(h))
        h = after_4a = self.inception4a(F.max_pooling_2d(h, 3, stride=2))
        h = after_4d = self.inception4d(self.inception4c(self.inception4b(h)))
        h = self.inception4e(h)
        h = self.inception5b(self.inception5a(F.max_pooling_2d(h, 3, stride=2)))
        scores = self.fc(F.dropout(F.mean(h, axis=(2, 3)), 0.4))
        if not chainer.config.train:
            return scores
        return scores, self.auxiliary1(after_4a), self.auxiliary2(after_4d)


class Auxiliary(chainer.Chain):
    """Classifier in the middle of the network, which brings gradients to its lower layers.

    Parameters
    ----------
    n_in : int
        Channels of its input.
    n_out : int
        Number of classes.
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(n_in, 128, 1)
            self.fc1 = L.Linear(None, 1024)
            self.fc2 = L.Linear(1024, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.relu(self.conv(F.average_pooling_2d(x, min(5, *x.shape[2:]), stride=3)))
        return self.fc2(F.dropout(F.relu(self.fc1(h)), 0.7))
