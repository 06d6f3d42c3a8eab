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
    """Nine Inception modules, and two auxiliary classifiers that only take part in training."""

    insize = 224

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, 7, stride=2, pad=3)
            self.conv2_reduce = L.Convolution2D(64, 64, 1)
            self.conv2 = L.Convolution2D(64, 192, 3, pad=1)
            for name, channels in INCEPTIONS.items():
                setattr(self, f"inc{name}", L.Inception(*channels))
            self.loss3_fc = L.Linear(1024, n_out)
            self.loss1_conv = L.Convolution2D(512, 128, 1)
            self.loss1_fc1 = L.Linear(128 * 4 * 4, 1024)
            self.loss1_fc2 = L.Linear(1024, n_out)
            self.loss2_conv = L.Convolution2D(528, 128, 1)
            self.loss2_fc1 = L.Linear(128 * 4 * 4, 1024)
            self.loss2_fc2 = L.Linear(1024, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable | tuple[chainer.Variable, ...]:
        """Return the scores of the classes; see the package."""
        h = F.max_pooling_2d(F.relu(self.conv1(x)), 3, stride=2)
        h = F.local_response_normalization(h, n=5)
        h = F.relu(self.conv2(F.relu(self.conv2_reduce(h))))
        h = F.max_pooling_2d(F.local_response_normalization(h, n=5), 3, stride=2)
        h = self.inc3b(self.inc3a(h))
        h = after_4a = self.inc4a(F.max_pooling_2d(h, 3, stride=2))
        h = after_4d = self.inc4d(self.inc4c(self.inc4b(h)))
        h = self.inc4e(h)
        h = self.inc5b(self.inc5a(F.max_pooling_2d(h, 3, stride=2)))
        scores = self.loss3_fc(F.dropout(F.mean(h, axis=(2, 3)), 0.4))
        if not chainer.config.train:
            return scores
        return scores, self._auxiliary("loss1", after_4a), self._auxiliary("loss2", after_4d)

    def _auxiliary(self, name: str, h: chainer.Variable) -> chainer.Variable:
        """Return the scores of a classifier in the middle of the network."""
        h = F.relu(self[f"{name}_conv"](F.average_pooling_2d(h, 5, stride=3)))
        return self[f"{name}_fc2"](F.relu(self[f"{name}_fc1"](h)))
