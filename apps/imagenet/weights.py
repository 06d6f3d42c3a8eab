"""Initial weights: those of another training, all, or all except the head."""

from collections.abc import Callable, Iterable

import chainer
import numpy as np

from chainer_compat.npz import open_npz


def load_weights(path: str, network: chainer.Link, but: Iterable[str] = ()) -> list[str]:
    """Load a file that contains exactly the weights of a network.

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
    own, left_out = chainer.serializers.npz.serialize(network), set(but)
    # A layer that does not know its input yet has no array.
    shapes = {name: np.shape(array) for name, array in own.items() if array is not None}
    with open_npz(path) as saved:
        found = {name: saved.header(name).shape for name in saved}
        faults = {
            "it lacks": own.keys() - found.keys(),
            "it also has": found.keys() - own.keys(),
            "of other shapes are": (
                f"{name} {found[name]}, not {shape}"
                for name, shape in shapes.items()
                if name in found and name not in left_out and found[name] != shape
            ),
        }
        told = [f"{fault} {text}" for fault, names in faults.items() if (text := _some(names))]
        if told:
            raise ValueError(
                f"{path} does not have the weights of this network: {'; '.join(told)}"
            )
        # Check all before loading any, because the last may be damaged.
        arrays = {name: own[name] if name in left_out else saved[name] for name in own}
    chainer.serializers.NpzDeserializer(arrays).load(network)
    return sorted(own.keys() - left_out)


def head_of(architecture: Callable[[int], chainer.Link]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    one, other = (chainer.serializers.npz.serialize(architecture(n)) for n in (2, 3))
    return {name for name in one if np.shape(one[name]) != np.shape(other[name])}


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
