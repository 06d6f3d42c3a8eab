"""A network that train.py has trained, with everything needed to use it."""

from dataclasses import dataclass
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np

from chainermn.files import read_json
from lists import MOST_CLASSES
from models import ARCHITECTURES
from weights import load_weights

DEFAULTS = (Path("result/best.npz"), Path("result/model.npz"))
FORM = {
    "arch": set(ARCHITECTURES),
    "classes": [str],
    "insize": range(1, 1025),
    "mean": (float,) * 3,
    "deviation": (float,) * 3,
}
SHOWN = 5  # classes of an image


class Recognizer(chainer.Chain):
    """A network from the colors of images to the probability of each class.

    Parameters
    ----------
    network : chainer.Link
    mean, deviation : sequence of float
        Values for red, green and blue with which the network was trained.
    """

    def __init__(self, network: chainer.Link, mean: list[float], deviation: list[float]) -> None:
        super().__init__()
        with self.init_scope():
            self.network = network
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.add_persistent(name, np.array(values, np.float32).reshape(3, 1, 1))

    def forward(self, x: np.ndarray | chainer.Variable) -> chainer.Variable:
        """Return shares of shape (batch, classes), which add up to 1.

        Parameters
        ----------
        x : array of float32
            Images of shape (batch, 3, height, width): red, green and blue, from 0 to 255.
        """
        return F.softmax(self.network((x - self.mean) / self.deviation))


@dataclass(frozen=True)
class Trained:
    """A trained network, as `load` returns it."""

    recognizer: Recognizer
    insize: int  # height and width of the images, in pixels
    classes: list[str]

    def shares(self, images: np.ndarray) -> np.ndarray:
        """Return the probability of each class, float32 of shape (batch, classes).

        Parameters
        ----------
        images : array of uint8
            Images of shape (batch, 3, insize, insize).
        """
        x = self.recognizer.device.send(images.astype(np.float32))
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return chainer.get_device("@numpy").send(self.recognizer(x).array)

    def likeliest(self, shares: np.ndarray) -> list[tuple[str, float]]:
        """Return the names of the most likely classes, in order, and their probabilities."""
        return [(self.classes[i], float(shares[i])) for i in np.argsort(-shares)[:SHOWN]]


def load(weights: Path | None = None) -> Trained:
    """Load weights, and ``model.json`` in the same folder.

    Parameters
    ----------
    weights : path, optional
        ``best.npz`` or ``model.npz`` of train.py; by default the first of the two that is in the
        folder ``result``.

    Raises
    ------
    OSError, ValueError
        If a file is missing or damaged, or the two do not belong together.
    """
    weights = weights or next((path for path in DEFAULTS if path.exists()), DEFAULTS[0])
    about = weights.with_name("model.json")
    known = read_json(about, FORM)
    if not 1 <= len(known["classes"]) <= MOST_CLASSES:
        expected = f"1 to lists.MOST_CLASSES = {MOST_CLASSES}"
        raise ValueError(f"{about}: expected {expected} classes, got {len(known['classes'])}")
    network = ARCHITECTURES[known["arch"]](len(known["classes"]))
    recognizer = Recognizer(network, known["mean"], known["deviation"])
    trained = Trained(recognizer, known["insize"], known["classes"])
    load_weights(weights, network)
    return trained
