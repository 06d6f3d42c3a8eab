"""Initial weights: those of another training, here or in PyTorch; all, or all except the head."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import numpy as np

from chainer_compat.npz import open_npz
from chainer_compat.tensors import Tensors, is_tensors, open_tensors
from chainermn.files import parse_json, read_json
from models import ARCHITECTURES, create
from models.torchvision import COLORS, COUNTER, NAMES

DESCRIPTION = {
    "arch": set(ARCHITECTURES),
    "classes": [str],
    "insize": range(1, 1025),
    "mean": (float,) * 3,
    "deviation": (float,) * 3,
}
# What is known of weights from elsewhere, if they come from such a network.
KEPT = {name: DESCRIPTION[name] for name in ("classes", "mean", "deviation")}


@dataclass(frozen=True)
class Weights:
    """Weights in an open file.

    Attributes
    ----------
    names : dict of str
        The name in the file of each, by its name in the network.
    shapes : dict of tuple of int
        The shape of each, by its name in the network.
    read : callable
        Function that returns an array, given its name in the network.
    about : dict
        What the file, or ``model.json`` beside it, says about the network: ``arch``, ``mean``,
        ``deviation``, ``classes``. All or some of them may be absent.
    """

    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    about: dict[str, Any]


@contextlib.contextmanager
def open_weights(path: str | Path, arch: str | None = None) -> Iterator[Weights]:
    """Open a file of weights for reading: an NPZ file, or one of PyTorch.

    Parameters
    ----------
    path : path
        NPZ file that `chainer.serializers.save_npz` has written; or a state dict of torchvision,
        as ``.pth`` or ``.safetensors``.
    arch : str, optional
        Network that they should be of.

    Raises
    ------
    ImportError, OSError, ValueError
        If the file cannot be read, or is known to be of another network.
    """
    if is_tensors(path):
        with open_tensors(path) as found:
            weights = _translated(path, found, arch)
            _check(weights.about, str(path), arch)
            yield weights
        return
    with open_npz(path) as saved:
        description, about = Path(path).with_name("model.json"), {}
        if description.exists():
            about = read_json(description, DESCRIPTION)
            _check(about, f"{path}, according to {description},", arch)
        shapes = {name: saved.header(name).shape for name in saved}
        yield Weights({name: name for name in saved}, shapes, saved.__getitem__, about)


def _translated(path: str | Path, found: Tensors, arch: str | None) -> Weights:
    faults = {
        known: {
            "it lacks": {name for name in names.values() if COUNTER not in name} - found.keys(),
            "it also has": found.keys() - names.values(),
        }
        for known, names in NAMES.items()
    }

    def unlikeness(known: str) -> tuple[int, int]:
        shared = found.keys() & NAMES[known].values()
        return -len(shared), sum(map(len, faults[known].values()))

    own = min(NAMES, key=unlikeness)
    if _listed(faults[own]):
        other = arch if arch in NAMES else own
        reason = f"compared with {other}, {_listed(faults[other])}"
        prefixes = {name.partition(".")[0] for name in found}
        if len(prefixes) == 1:  # such as DistributedDataParallel's "module"
            reason = f"all names begin with '{prefixes.pop()}.': save the weights without that"
        raise ValueError(
            f"{path} has the weights of none of torchvision's {', '.join(NAMES)}: {reason}"
        )
    names = NAMES[own]

    def read(name: str) -> np.ndarray:
        array = found[names[name]] if names[name] in found else np.array(0)
        # Converting all values of a file to another type makes a float of a counter too.
        return array.astype(np.int64) if COUNTER in names[name] else array

    shapes = {name: found.shapes.get(other, ()) for name, other in names.items()}
    about = {"arch": own, **COLORS}
    if KEPT.keys() <= found.metadata.keys():  # written by export.py
        for name, form in KEPT.items():
            place = f"{path}: {name!r} in its metadata"
            about[name] = parse_json(found.metadata[name].encode(), place, form)
    return Weights(names, shapes, read, about)


def _check(about: dict[str, Any], source: str, arch: str | None) -> None:
    if arch not in (None, about["arch"]):
        raise ValueError(f"{source} is of {about['arch']}, not of {arch}: omit --arch")
    if min(about["deviation"]) <= 0:
        raise ValueError(f"{source}: expected deviations above 0, got {about['deviation']}")


def load_network(
    path: str | Path, arch: str, n_out: int, but: Collection[str] = ()
) -> tuple[chainer.Link, list[str]]:
    """Return the network that a file has exactly the weights of.

    Parameters
    ----------
    path : path
        See `open_weights`.
    arch : str
    n_out : int
        Number of classes.
    but : collection of str
        Names of weights that are not loaded, and may have other shapes.

    Returns
    -------
    network : chainer.Link
    loaded : list of str
        The names that were loaded.

    Raises
    ------
    ImportError, OSError, ValueError
        If the file cannot be read, has other names or shapes, or values that are not finite.
    """
    with open_weights(path, arch) as saved:
        network = create(arch, n_out, saved.names)
        own = chainer.serializers.npz.serialize(network)
        # A layer that does not know its input yet has None.
        shapes = {name: array.shape for name, array in own.items() if array.dtype != object}
        other = {
            name: shape
            for name, shape in shapes.items()
            if name not in but and saved.shapes.get(name, shape) != shape
        }
        faults = {
            "it lacks": own.keys() - saved.names.keys(),
            "it also has": saved.names.keys() - own.keys(),
            "of other shapes are": (
                f"{saved.names[name]} {saved.shapes[name]}, not {shape}"
                for name, shape in other.items()
            ),
        }
        if told := _listed(faults):
            is_head = all(saved.shapes[name][1:] == shape[1:] for name, shape in other.items())
            if own.keys() == saved.names.keys() and is_head and not but:
                told += ". To train with another number of classes, add --finetune"
            raise ValueError(
                f"{path} does not have the weights of {arch} for {n_out} classes: {told}"
            )
        # Check all before loading any, because the last may be damaged.
        arrays = {name: own[name] if name in but else saved.read(name) for name in own}
        loaded = sorted(own.keys() - but)
        strange = [
            saved.names[name]
            for name in loaded
            if arrays[name].dtype.kind == "f" and not np.isfinite(arrays[name]).all()
        ]
        if strange:
            raise ValueError(
                f"{path} has values that are not finite: {_some(strange)}. Either its training "
                "diverged, or these layers were left out, as in torchvision's vgg16_features"
            )
    chainer.serializers.NpzDeserializer(arrays).load(network)
    return network, loaded


def head_of(architecture: Callable[[int], chainer.Link]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    one, other = (chainer.serializers.npz.serialize(architecture(n)) for n in (2, 3))
    return {name for name in one if np.shape(one[name]) != np.shape(other[name])}


def _listed(faults: dict[str, Iterable[str]]) -> str:
    told = [f"{fault} {text}" for fault, names in faults.items() if (text := _some(names))]
    return "; ".join(told)


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
