"""A network that train.py has trained, with everything needed to use it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from chainermn.files import check_trained
from lists import MOST_CLASSES
from models import ARCHITECTURES
from weights import load_network, open_weights

DEFAULTS = (Path("result/best.npz"), Path("result/model.npz"))
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
    """A trained network, as `load` returns it.

    Attributes
    ----------
    recognizer : Recognizer
    about : dict
        Content of ``model.json``.
    """

    recognizer: Recognizer
    about: dict[str, Any]

    @property
    def insize(self) -> int:
        """Height and width of the images, in pixels."""
        return self.about["insize"]

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.about["classes"]

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


def load(path: Path | None = None) -> Trained:
    """Load weights, and ``model.json`` in the same folder.

    Parameters
    ----------
    path : path, optional
        ``best.npz`` or ``model.npz`` of train.py; by default the first of the two that is in the
        folder ``result``. A file of export.py is also taken, and needs no ``model.json``.

    Raises
    ------
    ImportError, OSError, ValueError
        If a file is missing or damaged, or the two do not belong together.
    """
    path = path or next((path for path in DEFAULTS if path.exists()), DEFAULTS[0])
    check_trained(path, __file__)
    with open_weights(path) as found:
        about = found.about
    if "classes" not in about:
        raise FileNotFoundError(
            "the names of the classes are missing: expected an NPZ file with model.json beside "
            f"it, which train.py writes, or a safetensors file of export.py, got {path}"
        )
    about.setdefault("insize", ARCHITECTURES[about["arch"]].insize)
    if not 1 <= len(about["classes"]) <= MOST_CLASSES:
        expected = f"1 to lists.MOST_CLASSES = {MOST_CLASSES}"
        raise ValueError(f"{path}: expected {expected} classes, got {len(about['classes'])}")
    network, _ = load_network(path, about["arch"], len(about["classes"]))
    return Trained(Recognizer(network, about["mean"], about["deviation"]), about)
