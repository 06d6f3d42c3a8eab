"""What snapshots hold: settings that label them, the state of a trainer, and that of each rank."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import numpy as np
from numpy.typing import NDArray

from chainer_compat.npz import DamagedFileError, NpzArrays, open_npz
from chainermn.extensions.rank_states import Arrays, restore_generators
from chainermn.gradients.persistents import persistent_names

_SHOWN = 4  # number of different settings to show, at most
LABEL = "chainermn_settings"  # the array that holds a snapshot's settings
_RECORD = "chainermn_record"
_LENGTH = "chainermn_length"


class About(NamedTuple):
    """What is asked of a snapshot before it is chosen."""

    #: The settings of its run, as `label_of` returns them; None if it has none.
    settings: str | None
    iteration: int | None


class Record(NamedTuple):
    """What a snapshot says about the run that wrote it."""

    #: Number of ranks, 0 if it is not known; and those whose own state the snapshot has.
    size: int = 0
    ranks: Sequence[int] = ()
    #: With ``n_retains``, names of the snapshots that the run has written, the latest last.
    written: Sequence[str] = ()
    #: What a resumed run cannot repeat.
    not_restored: Sequence[str] = ()


def label_of(settings: Mapping[str, Any] | None) -> str | None:
    """Return the text that represents settings in comparisons."""
    return None if settings is None else json.dumps(dict(settings), sort_keys=True)


def save(
    serializer: chainer.Serializer, label: str | None, record: Record, states: Sequence[Arrays]
) -> None:
    """Save settings, a record, and the state of each rank in it; see `rank_states`."""
    if label is not None:
        serializer(LABEL, np.array(label))
    inner = serializer[_RECORD]
    inner("size", np.int64(record.size))
    inner("ranks", np.array(record.ranks, np.int64))
    inner("written", np.array(record.written, str))
    inner("not_restored", np.array(record.not_restored, str))
    for rank, own in zip(record.ranks, states, strict=True):
        for key, array in own.items():
            inner(f"{rank}/{key}", array)


def about(saved: NpzArrays) -> About:
    """Return what an open snapshot says about itself; raise OSError if it makes no sense."""
    label = next((key for key in saved if f"/{key}".endswith(f"/{LABEL}")), None)
    iteration = "updater/iteration"
    return About(
        settings=None if label is None else _single(saved, label, str),
        iteration=_single(saved, iteration, int) if iteration in saved else None,
    )


def _single(saved: NpzArrays, key: str, kind: Callable[[Any], Any]) -> Any:
    header = saved.header(key)
    if header.dtype.hasobject:
        saved[key]  # refuses a file that could run code
    if header.shape != () or header.dtype.kind not in ("U" if kind is str else "iu"):
        raise DamagedFileError(f"{key!r} is not a single {kind.__name__}: {header.dtype}")
    return kind(saved[key])


def load(path: Path, contents: bytes, target: Any, rank: int = 0, size: int = 0) -> Record:
    """Load the contents of a file into a trainer, or into another object that can be loaded.

    Parameters
    ----------
    path : Path
        Path of the file, for messages.
    contents : bytes
        Contents of the file.
    target : object
        What is loaded.
    rank, size : int
        This rank, and the number of ranks. If as many have written the file, this rank gets what
        it had of its own.

    Returns
    -------
    Record
        What the file says about the run that wrote it.

    Raises
    ------
    OSError, ValueError
        If the file is damaged or unsafe, or does not fit. Part of it may have been loaded.
    """
    try:
        with open_npz(io.BytesIO(contents), str(path)) as saved:
            record, own = _state_of(saved, rank, size)
            saved.replace(own)
            saved.replace(_fit_iterators(saved, target, is_own=bool(own)))
            chainer.serializers.NpzDeserializer(saved).load(target)
            if own:  # last, because loading may draw
                restore_generators(target, own)
            return record
    except OSError:  # its message tells what is wrong with the file
        raise
    except Exception as error:  # every object that is loaded may raise other types
        raise ValueError(
            f"{path} does not fit: was it written with other settings, or by another script? "
            f"({type(error).__name__}: {error})"
        ) from error


def _state_of(saved: NpzArrays, rank: int, size: int) -> tuple[Record, dict[str, Any]]:
    """Return the record of an open snapshot, and what it has for a rank, if it fits."""
    last = f"{_RECORD}/size"
    prefix = next((key.removesuffix("size") for key in saved if key.endswith(last)), None)
    if prefix is None:
        return Record(), {}
    record = Record(
        int(saved[f"{prefix}size"]),
        *(saved[f"{prefix}{name}"].tolist() for name in ("ranks", "written", "not_restored")),
    )
    own: dict[str, Any] = {}
    if record.size == size and rank in record.ranks:
        for place in (f"{prefix}{record.ranks[0]}/", f"{prefix}{rank}/"):
            own |= {key[len(place) :]: saved[key] for key in saved if key.startswith(place)}
    return record, own


def difference(path: Path, label: str | None) -> str:
    """Describe how the settings of a snapshot differ from those of this run; ``''`` if not."""
    if label is None:
        return ""
    with open_npz(path) as saved:
        found = about(saved).settings or ""
    now = json.loads(label)
    try:
        then = dict(json.loads(found))
    except (TypeError, ValueError):
        return f"{path} does not have the settings of its run"
    differing = [
        f"{name}: {then.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    text = "; ".join(differing[:_SHOWN])
    if len(differing) > _SHOWN:
        text += f"; and {len(differing) - _SHOWN} more"
    return text and f"{path} was written with other settings ({text})"


def lengths_of_data(arrays: Iterable[str], target: Any) -> dict[str, Any]:
    """Return the number of examples of each iterator of a trainer, with keys next to its own.

    They turn the position in examples that are not shuffled into a fraction of the epoch.
    """
    lengths = {}
    for key, iterator in _iterators(arrays, target):
        dataset = getattr(iterator, "dataset", None)
        if dataset is not None:
            lengths[f"{key}{_LENGTH}"] = np.array(len(dataset))
    return lengths


def digests_of_model(path: Path, target: Any) -> dict[str, bytes]:
    """Return digests of the parameters in a snapshot of a trainer or a link, by key.

    For other objects, return the digests of all arrays. Persistent values, such as the statistics
    of batch normalization, are left out, because they may differ between replicas.
    """
    links = {"": target}
    if hasattr(target, "updater"):
        optimizers = target.updater.get_all_optimizers().items()
        links = {f"updater/model:{name}/": optimizer.target for name, optimizer in optimizers}
    digests = {}
    with open_npz(path) as saved:
        for prefix, link in links.items():
            persistent = _persistent_values(link)
            for key in saved:
                is_label = key.startswith("chainermn_")
                is_persistent = key.removeprefix(prefix) in persistent
                if key.startswith(prefix) and not is_label and not is_persistent:
                    digests[key] = _digest(saved[key])
    return digests


def _persistent_values(target: Any) -> set[str]:
    if not isinstance(target, chainer.Link):
        return set()
    links = target.namedlinks()
    return {
        f"{path}/{name}".lstrip("/") for path, link in links for name in persistent_names(link)
    }


def _digest(array: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(repr((array.shape, array.dtype)).encode(), digest_size=16)
    # The value of a parameter without an array is None.
    is_object = array.dtype.hasobject
    digest.update(repr(array.tolist()).encode() if is_object else array.tobytes())
    return digest.digest()


def _iterators(keys: Iterable[str], target: Any) -> Iterator[tuple[str, Any]]:
    """Yield each iterator of a trainer, with the prefix of its keys in a snapshot."""
    for key in keys:
        found = re.fullmatch(r"(updater/iterator:([^/]+)/)current_position", key)
        if found and hasattr(target.updater, "get_iterator"):
            yield found[1], target.updater.get_iterator(found[2])


def _fit_iterators(saved: Mapping[str, Any], trainer: Any, is_own: bool) -> dict[str, Any]:
    """Return replacements for orders and positions in ``saved`` that do not fit this rank.

    Those of another rank have as many examples, but not always the same ones.
    """
    fitted: dict[str, Any] = {}
    for prefix, iterator in _iterators(saved, trainer):
        now = chainer.serializers.DictionarySerializer()
        iterator.serialize(now)
        # Only MultithreadIterator has the underscore.
        key = next((key for key in ("order", "_order") if f"{prefix}{key}" in saved), "order")
        order, order_then = now.target.get(key), saved.get(f"{prefix}{key}")
        order_of = getattr(getattr(iterator, "order_sampler", None), "order", None)
        if callable(order_of) and order_then is not None:
            order = order_of(int(saved[f"{prefix}epoch"]))
        then = saved.get(f"{prefix}{_LENGTH}") if order_then is None else len(order_then)
        if then is None or (order is None and order_then is not None):
            continue
        n = len(iterator.dataset) if order is None else len(order)
        if n == then and (is_own or not callable(order_of)):
            continue
        if order is not None:
            fitted[f"{prefix}{key}"] = order
        position = saved[f"{prefix}current_position"]
        fitted[f"{prefix}current_position"] = position * n // int(then)
    return fitted
