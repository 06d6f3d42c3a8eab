"""Files to begin with: weights of a network, and snapshots of a training."""

from collections.abc import Iterable

import chainer
import numpy as np

from data import EpochOrder

ITERATOR = "updater/iterator:main"


def load_weights(path: str, network: chainer.Link) -> None:
    """Load a file that has the weights of a network, all of them and nothing else.

    Parameters
    ----------
    path : str
        NPZ file that `chainer.serializers.save_npz` has written.
    network : chainer.Link

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has other names or shapes.
    """
    arrays = _read(path)
    own = chainer.serializers.npz.serialize(network)
    # A layer that does not know its input yet has no array.
    shapes = {name: np.shape(array) for name, array in own.items() if array is not None}
    faults = {
        "it lacks": own.keys() - arrays.keys(),
        "it also has": arrays.keys() - own.keys(),
        "of other shapes are": (
            f"{name} {arrays[name].shape}, not {shape}"
            for name, shape in shapes.items()
            if name in arrays and arrays[name].shape != shape
        ),
    }
    found = [f"{fault} {text}" for fault, names in faults.items() if (text := _some(names))]
    if found:
        raise ValueError(f"{path} does not have the weights of this network: {'; '.join(found)}")
    chainer.serializers.NpzDeserializer(arrays).load(network)


def load_snapshot(path: str, trainer: chainer.training.Trainer, orders: EpochOrder) -> None:
    """Let a trainer go on from a snapshot, which any number of ranks may have trained.

    The snapshot is that of rank 0, whose images are not those of this rank.

    Parameters
    ----------
    path : str
    trainer : chainer.training.Trainer
    orders : EpochOrder
        Of this rank.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or is not a snapshot of such a trainer.
    """
    arrays = _read(path)
    try:
        order = orders.of_epoch(int(arrays[f"{ITERATOR}/epoch"]))
        position = arrays[f"{ITERATOR}/current_position"]
        position = position * len(order) // len(arrays[f"{ITERATOR}/order"])
        arrays |= {f"{ITERATOR}/order": order, f"{ITERATOR}/current_position": position}
        chainer.serializers.NpzDeserializer(arrays).load(trainer)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a snapshot of such a training ({type(error).__name__}: {error}). "
            "--arch and the number of classes must be those that it was written with"
        ) from None


def _read(path: str) -> dict[str, np.ndarray]:
    """Read all arrays of a file, whose checksums are compared on the way."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=True) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib, pickle and NumPy each have their own
        raise ValueError(
            f"{path} is damaged, or not an NPZ file ({type(error).__name__}: {error})"
        ) from None


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
