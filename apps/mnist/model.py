"""The network."""

import chainer
import chainer.functions as F
import chainer.links as L


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
            Images, of shape (batch, pixels) and dtype float32.

        Returns
        -------
        chainer.Variable
            Of shape (batch, n_out), before the softmax.
        """
        h = F.relu(self.l1(x))
        h = F.relu(self.l2(h))
        return self.l3(h)
