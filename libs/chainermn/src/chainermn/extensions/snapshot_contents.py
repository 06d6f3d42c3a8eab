"""Read snapshots: the settings they are labelled with, and the state of a trainer."""

from __future__ import annotations

import io
import json
import re
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chainer
import numpy as np

_SHOWN = 4  # differences between settings, at most
LABEL = "chainermn_settings"  # the array that holds a snapshot's settings


def label_of(settings: Mapping[str, Any] | None) -> str | None:
    """Return the text that settings are compared by."""
    return None if settings is None else json.dumps(dict(settings), sort_keys=True)


def load(path: Path, contents: bytes, target: Any) -> None:
    """Load what a file contains into a trainer, or into another object that can be loaded.

    Raises
    ------
    ValueError
        If the file is damaged or does not fit; part of it may have been loaded by then.
    """
    try:
        with np.load(io.BytesIO(contents), allow_pickle=True) as saved:
            fitted = _fit_iterators(saved, target)
            chainer.serializers.NpzDeserializer(ChainMap(fitted, saved)).load(target)
    except Exception as error:  # zipfile, NumPy and everything that is loaded have their own
        raise ValueError(
            f"{path} is damaged, or does not fit: was it written with other settings, or by "
            f"another script? ({type(error).__name__}: {error})"
        ) from error


def difference(path: Path, label: str | None) -> str:
    """Tell how the settings of a snapshot differ from those of this run; ``''`` if they do not."""
    if label is None:
        return ""
    with np.load(path) as saved:
        found = next((str(saved[key]) for key in saved if key.endswith(f"/{LABEL}")), None)
    if found is None:
        return f"{path} does not say with which settings it was written"
    then, now = json.loads(found), json.loads(label)
    differing = [
        f"{name}: {then.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    text = "; ".join(differing[:_SHOWN])
    if len(differing) > _SHOWN:
        text += f"; and {len(differing) - _SHOWN} more"
    return text and f"{path} was written with other settings ({text})"


def _fit_iterators(saved: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    """Return replacements for the orders and positions in ``saved`` that do not fit this rank."""
    fitted: dict[str, Any] = {}
    for key in saved:
        found = re.fullmatch(r"(updater/iterator:([^/]+)/)order", key)
        if found is None:
            continue
        prefix, name = found.groups()
        iterator = trainer.updater.get_iterator(name)
        order_of = getattr(getattr(iterator, "order_sampler", None), "order", None)
        if callable(order_of):
            order = order_of(int(saved[f"{prefix}epoch"]))
        else:
            now = chainer.serializers.DictionarySerializer()
            iterator.serialize(now)
            order = now.target.get("order")
            if order is None or np.shape(order) == saved[key].shape:
                continue
        position = saved[f"{prefix}current_position"]
        fitted[key] = order
        fitted[f"{prefix}current_position"] = position * len(order) // len(saved[key])
    return fitted
