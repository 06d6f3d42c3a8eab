"""Explain errors from loading a snapshot of a job with a different number of ranks."""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import Any

#: Key with which a `MultiNodeOptimizer` saves the number of ranks.
N_RANKS = "chainermn_ranks"

_ORDER = re.compile(r"(.*/)?iterator:[^/]+/_?order")
_REMEDY = (
    "To resume with another number of ranks, write and load snapshots with "
    "chainermn.extensions.multi_node_snapshot(comm, extensions.snapshot(autoload=True), []). It "
    "also loads this snapshot from the trainer's folder, if you append .0 to its file name and "
    "give extensions.snapshot the filename= with which it was written"
)


def explain(error: BaseException) -> None:
    """Add a note to an error if its cause is that an iterator does not fit the snapshot.

    A snapshot holds the order of the examples of one rank. With a different number of ranks, each
    has a different number of examples, so chainer_compat refuses to load the order. The frames of
    the error's traceback show the numbers.
    """
    if not isinstance(error, ValueError):
        return  # reading `f_locals` of a frame would keep its objects alive
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
        elif ranks and frame.f_code.co_name == "read_for" and _ORDER.fullmatch(local["key"]):
            (saved,), own = local["shape"], len(local["value"])
            return _compare(_saved_ranks(file), saved, ranks, own)
    return ""


def _ranks_of(updater: Any) -> int | None:
    """Return the number of ranks that average gradients; None without ChainerMN."""
    optimizers = updater.get_all_optimizers().values()
    communicators = (getattr(optimizer, "communicator", None) for optimizer in optimizers)
    return next((int(each.size) for each in communicators if each is not None), None)


def _saved_ranks(file: Any) -> int | None:
    """Return the number of ranks of the job that wrote a snapshot; None if it is not saved."""
    from chainer_compat.npz import open_npz  # here, so that commands start quickly

    with open_npz(file) as saved:
        key = next((key for key in saved if key.endswith(f"/{N_RANKS}")), None)
        return None if key is None else int(saved[key])


def _compare(saved_ranks: int | None, saved_length: int, ranks: int, length: int) -> str:
    if saved_length == length:
        return ""
    lengths = f"{saved_length} examples on each rank; this job has {length}"
    if saved_ranks is None:
        reason = f"Either the number of ranks or the data have changed. {_REMEDY}"
        return f"This snapshot was written by a job with {lengths}. {reason}."
    if saved_ranks == ranks:
        lengths += ", on the same number of ranks"
        reason = "the data have changed, or are divided in another way"
        return f"This snapshot was written by a job with {lengths}: {reason}."
    now = f"and this job has {_counted(ranks)}. {_REMEDY}"
    return f"This snapshot was written by a job of {_counted(saved_ranks)}, {now}."


def _counted(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
