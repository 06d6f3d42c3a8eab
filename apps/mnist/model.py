"""The networks, by their names for ``--model``."""

from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L

from chainermn.files import check_trained


class MLP(chainer.Chain):
    """Perceptron with two hidden layers.

    Parameters
    ----------
    n_units : int
        Units of each hidden layer.
    n_out : int
        Number of classes.
    """

    def __init__(self, n_units: int, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            # None: the first batch tells how many pixels an image has.
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes.

        Parameters
        ----------
        x : chainer.Variable or array
            Images, of shape (batch, height, width) and dtype float32.

        Returns
        -------
        chainer.Variable
            Scores of shape (batch, n_out), before the softmax.
        """
        h = F.relu(self.l1(x))
        h = F.relu(self.l2(h))
        return self.l3(h)


class CNN(chainer.Chain):
    """Two convolutions, then a perceptron; takes and returns what `MLP` does.

    Parameters
    ----------
    n_units : int
        Units of the hidden layer.
    n_out : int
        Number of classes.
    """

    def __init__(self, n_units: int, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 32, 3, pad=1)
            self.conv2 = L.Convolution2D(32, 64, 3, pad=1)
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, n_out)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.expand_dims(x, 1)
        h = F.max_pooling_2d(F.relu(self.conv1(h)), 2)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), 2)
        h = F.dropout(F.relu(self.l1(h)), 0.5)
        return self.l2(h)


MODELS = {"mlp": MLP, "cnn": CNN}


def load_weights(path: Path, network: chainer.Chain) -> None:
    """Load the weights of a network.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has the weights of another network.
    """
    check_trained(path, __file__)
    try:
        chainer.serializers.load_npz(path, network)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has the weights of another network: --model, --unit, the size of the images "
            f"and the number of classes must be those that it was trained with ({error})"
        ) from None
