"""Weights to begin with: those of another training, all of them or all but the head."""

from collections.abc import Callable, Iterable

import chainer
import numpy as np


def load_weights(path: str, network: chainer.Link, but: Iterable[str] = ()) -> list[str]:
    """Load a file that has the weights of a network, all of them and nothing else.

    Parameters
    ----------
    path : str
        NPZ file that `chainer.serializers.save_npz` has written.
    network : chainer.Link
    but : iterable of str
        Names of weights that are not loaded, and may have other shapes.

    Returns
    -------
    list of str
        The names that were loaded.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has other names or shapes.
    """
    arrays, left_out = _read(path), set(but)
    own = chainer.serializers.npz.serialize(network)
    # A layer that does not know its input yet has no array.
    shapes = {name: np.shape(array) for name, array in own.items() if array is not None}
    faults = {
        "it lacks": own.keys() - arrays.keys(),
        "it also has": arrays.keys() - own.keys(),
        "of other shapes are": (
            f"{name} {arrays[name].shape}, not {shape}"
            for name, shape in shapes.items()
            if name in arrays and name not in left_out and arrays[name].shape != shape
        ),
    }
    found = [f"{fault} {text}" for fault, names in faults.items() if (text := _some(names))]
    if found:
        raise ValueError(f"{path} does not have the weights of this network: {'; '.join(found)}")
    arrays |= {name: own[name] for name in left_out}
    chainer.serializers.NpzDeserializer(arrays).load(network)
    return sorted(own.keys() - left_out)


def head_of(architecture: Callable[[int], chainer.Link]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    one, other = (chainer.serializers.npz.serialize(architecture(n)) for n in (2, 3))
    return {name for name in one if np.shape(one[name]) != np.shape(other[name])}


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
