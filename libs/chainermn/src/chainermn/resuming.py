"""Say of an error that comes while a snapshot is loaded that other ranks have written it."""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import Any

#: What a `MultiNodeOptimizer` calls the number of ranks in a snapshot.
N_RANKS = "chainermn_ranks"

_ORDER = re.compile(r"(.*/)?iterator:[^/]+/_?order")
_REMEDY = (
    "To go on with another number of ranks, write and load snapshots by "
    "chainermn.extensions.multi_node_snapshot(comm, extensions.snapshot(autoload=True), []). It "
    "loads this one as well, if you append .0 to the name of the file"
)


def explain(error: BaseException) -> None:
    """Add a note to an error if it says that an iterator does not fit the snapshot.

    A snapshot holds the order of the examples of one rank. With another number of ranks a rank
    has another number of examples, and NumPy refuses to copy one order to the other.

    Parameters
    ----------
    error : exception
        As it was raised: what is looked at are the frames of its traceback.
    """
    if not isinstance(error, ValueError):
        return  # not even its frames are looked at, as they would then keep what they hold
    with contextlib.suppress(Exception):  # the error itself is more important
        if note := _note(error):
            error.add_note(note)


def _note(error: BaseException) -> str:
    file = ranks = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        local = frame.f_locals
        if frame.f_code.co_name == "load_npz":
            file = local["file"]
        elif hasattr(local.get("self"), "get_all_optimizers"):
            ranks = _ranks_of(local["self"])
        elif ranks and "dataset" in local and _ORDER.fullmatch(local["key"]):
            saved, own = len(local["dataset"]), len(local["value"])
            return _compare(_saved_ranks(file), saved, ranks, own)
    return ""


def _ranks_of(updater: Any) -> int | None:
    """Return the number of ranks over which gradients are averaged; None without ChainerMN."""
    optimizers = updater.get_all_optimizers().values()
    communicators = (getattr(optimizer, "communicator", None) for optimizer in optimizers)
    return next((int(each.size) for each in communicators if each is not None), None)


def _saved_ranks(file: Any) -> int | None:
    """Return by how many ranks a snapshot was written; None if it does not say so."""
    import numpy as np  # commands that do not load snapshots start without it

    with np.load(file) as saved:
        key = next((key for key in saved if key.endswith(f"/{N_RANKS}")), None)
        return None if key is None else int(saved[key])


def _compare(saved_ranks: int | None, saved_length: int, ranks: int, length: int) -> str:
    if saved_length == length:
        return ""
    lengths = f"{saved_length} examples on each rank; this job has {length}"
    if saved_ranks is None:
        return (
            f"This snapshot was written by a job with {lengths}. Either the number of ranks is "
            f"another one, or the data are. {_REMEDY}."
        )
    if saved_ranks == ranks:
        return (
            f"This snapshot was written by a job with {lengths}, on as many ranks: the data are "
            "others, or are divided in another way."
        )
    return (
        f"This snapshot was written by a job of {_counted(saved_ranks)}, and this job has "
        f"{_counted(ranks)}. {_REMEDY}."
    )


def _counted(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
