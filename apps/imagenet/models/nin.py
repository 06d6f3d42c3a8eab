"""Network in Network: Lin, Chen and Yan, ICLR 2014."""

import chainer
import chainer.functions as F
import chainer.initializers as I
import chainer.links as L


class NIN(chainer.Chain):
    """Four convolutions, each followed by two of 1x1 pixels; no fully connected layer."""

    insize = 227

    def __init__(self, n_out: int = 1000) -> None:
        super().__init__()
        relu = {"conv_init": I.HeNormal()}
        with self.init_scope():
            self.mlpconv1 = L.MLPConvolution2D(3, (96, 96, 96), 11, stride=4, **relu)
            self.mlpconv2 = L.MLPConvolution2D(96, (256, 256, 256), 5, pad=2, **relu)
            self.mlpconv3 = L.MLPConvolution2D(256, (384, 384, 384), 3, pad=1, **relu)
            self.mlpconv4 = L.MLPConvolution2D(384, (1024, 1024, n_out), 3, pad=1, **relu)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.max_pooling_2d(F.relu(self.mlpconv1(x)), 3, stride=2)
        h = F.max_pooling_2d(F.relu(self.mlpconv2(h)), 3, stride=2)
        h = F.max_pooling_2d(F.relu(self.mlpconv3(h)), 3, stride=2)
        h = self.mlpconv4(F.dropout(h))
        return F.mean(h, axis=(2, 3))
