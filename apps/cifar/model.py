"""A small residual network for images of 32x32 pixels."""

import io
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L

from chainer_compat.npz import open_npz

MOST_BYTES = 1 << 30  # of a file with weights


class Block(chainer.Chain):
    """Two convolutions, whose result is added to the input (He et al., 2016, section 3.3).

    Parameters
    ----------
    n_in, n_out : int
        Channels of the input and of the output.
    stride : int
        Stride of the first convolution; 2 halves height and width.
    """

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(n_in, n_out, 3, stride, 1, nobias=True)
            self.norm1 = L.BatchNormalization(n_out)
            self.conv2 = L.Convolution2D(n_out, n_out, 3, 1, 1, nobias=True)
            self.norm2 = L.BatchNormalization(n_out)
            if (n_in, stride) != (n_out, 1):
                self.shortcut = L.Convolution2D(n_in, n_out, 1, stride)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return an array of shape (batch, n_out, height / stride, width / stride)."""
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + (self.shortcut(x) if hasattr(self, "shortcut") else x))


class ResNet(chainer.Chain):
    """Three blocks, each of twice as many channels on half the pixels, then a classifier.

    Parameters
    ----------
    n_units : int
        Channels of the first block.
    n_out : int
        Number of classes.
    dropout : float
        Share of the last features that are dropped in training.
    """

    def __init__(self, n_units: int, n_out: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        with self.init_scope():
            self.conv = L.Convolution2D(3, n_units, 3, 1, 1, nobias=True)
            self.norm = L.BatchNormalization(n_units)
            self.block1 = Block(n_units, n_units, 1)
            self.block2 = Block(n_units, 2 * n_units, 2)
            self.block3 = Block(2 * n_units, 4 * n_units, 2)
            self.out = L.Linear(4 * n_units, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes.

        Parameters
        ----------
        x : chainer.Variable or array
            Images, of shape (batch, 3, height, width), from -1 to 1.

        Returns
        -------
        chainer.Variable
            Scores of shape (batch, n_out), before the softmax.
        """
        h = F.relu(self.norm(self.conv(x)))
        h = self.block3(self.block2(self.block1(h)))
        h = F.mean(h, axis=(2, 3))
        return self.out(F.dropout(h, self.dropout))


def load_weights(content: bytes, path: Path, network: chainer.Chain) -> None:
    """Load the weights of a network.

    Parameters
    ----------
    content : bytes
        Content of a file that Chainer's ``save_npz`` wrote.
    path : path
        Name of the file, for error messages.
    network : chainer.Chain

    Raises
    ------
    OSError, ValueError
        If it has another format, or the weights of another network.
    """
    try:
        with open_npz(io.BytesIO(content), str(path)) as arrays:
            chainer.serializers.NpzDeserializer(arrays).load(network)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has the weights of another network: --dataset and --unit must be those that "
            f"it was trained with ({error})"
        ) from None
