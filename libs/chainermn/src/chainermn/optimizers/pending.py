"""Save and load, in snapshots, the gradients that a rank still has to send.

Some of them differ between ranks. A snapshot that one rank writes for all ranks holds those of
all ranks, if this rank has received them before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np

#: Arrays by name, for each parameter.
Arrays: TypeAlias = Mapping[str, Mapping[str, Any]]

_LABEL = "label"
_COUNT = "parameters"


class PendingGradients(NamedTuple):
    """Pending gradients of a rank, as a snapshot holds them.

    Attributes
    ----------
    n_exchanges : int
        Number of exchanges before the snapshot.
    n_updates : int
        Number of updates since the last exchange.
    arrays : Arrays
        Pending arrays of each parameter.
    reason : str
        Reason why the snapshot lacks something; empty if it is complete.
    """

    n_exchanges: int = 0
    n_updates: int = 0
    arrays: Arrays = {}  # noqa: RUF012 - never changed
    reason: str = ""


def save(
    serializer: chainer.Serializer, n_ranks: int, of_ranks: Mapping[int, PendingGradients]
) -> None:
    """Save the pending gradients of some ranks."""
    first = next(iter(of_ranks.values()))
    serializer(_LABEL, np.array([n_ranks, first.n_exchanges, first.n_updates]))
    for rank, pending in of_ranks.items():
        of_rank = serializer[f"rank{rank}"]
        of_rank(_COUNT, np.array(len(pending.arrays)))
        for name, arrays in pending.arrays.items():
            of_parameter = of_rank[name]
            for key, array in arrays.items():
                of_parameter(key, array)


def load(
    serializer: chainer.Deserializer,
    n_ranks: int,
    rank: int,
    names: Iterable[str],
    keys: Iterable[str],
    is_compressed: bool,
) -> PendingGradients:
    """Return the pending gradients of a rank, as far as the snapshot has them.

    Parameters
    ----------
    serializer : chainer.Deserializer
        Part of the snapshot.
    n_ranks, rank : int
        Number of ranks of this job, and number of this rank.
    names, keys : iterable of str
        Names of the parameters, and of the arrays that each may have.
    is_compressed : bool
        Whether this job compresses gradients.
    """
    label = _loaded(serializer, _LABEL)
    if label is None:  # written with settings that leave nothing pending
        return PendingGradients()
    size, n_exchanges, n_updates = map(int, label)
    of_rank = serializer[f"rank{rank}"]
    count = _loaded(of_rank, _COUNT)
    if not (n_updates or count or _loaded(serializer["rank0"], _COUNT)):
        return PendingGradients(n_exchanges)
    keys, arrays = tuple(keys), {}
    if not keys or (n_exchanges and not is_compressed):
        return PendingGradients(n_exchanges, reason="the snapshot was written with other settings")
    if size != n_ranks:
        reason = f"the snapshot is from {size} ranks, but there are {n_ranks}"
        return PendingGradients(n_exchanges, reason=reason)
    if count is None:
        reason = (
            f"the snapshot lacks what rank {rank} had. Write it by "
            "chainermn.extensions.multi_node_snapshot, or use a multi-node checkpointer"
        )
        return PendingGradients(n_exchanges, reason=reason)
    for name in names:
        of_parameter = of_rank[name]
        found = {key: _loaded(of_parameter, key) for key in keys}
        if found := {key: array for key, array in found.items() if array is not None}:
            arrays[name] = found
    return PendingGradients(n_exchanges, n_updates, arrays)


def _loaded(serializer: chainer.Deserializer, key: str) -> Any:
    """Return an array of a snapshot, or None if it is not there."""
    try:
        return serializer(key, None)
    except (KeyError, ValueError):  # what npz and HDF5 raise
        return None
