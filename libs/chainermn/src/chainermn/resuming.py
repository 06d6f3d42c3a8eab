"""What resuming must know of this job, and errors from loading a snapshot of another one."""

from __future__ import annotations

import contextlib
import re

#: Key with which a `MultiNodeOptimizer` saves the number of ranks.
N_RANKS = "chainermn_ranks"

#: Calls of this process that shuffled without a seed, so a resumed run shuffles in another way.
unseeded_calls: set[str] = set()

_ranks = 0
_ORDER = re.compile(r"(.*/)?iterator:[^/]+/_?order")
_REMEDY = (
    "To resume with another number of ranks, write and load snapshots with "
    "chainermn.extensions.multi_node_snapshot(comm, extensions.snapshot(autoload=True), []). It "
    "also loads this snapshot from the trainer's folder, if you append .0 to its file name and "
    "give extensions.snapshot the filename= with which it was written"
)


def note_ranks(number: int) -> None:
    """Note how many ranks average the gradients of this job."""
    global _ranks
    _ranks = number


def explain(error: BaseException) -> None:
    """Add a note to an error if its cause is that an iterator does not fit the snapshot.

    A snapshot holds the order of the examples of one rank. With a different number of ranks, each
    has a different number of examples, so chainer_compat refuses to load the order.
    """
    with contextlib.suppress(Exception):  # the error itself is more important
        from chainer_compat.npz import ShapeError  # here, so that commands start quickly

        if _ranks and isinstance(error, ShapeError) and _ORDER.fullmatch(error.key):
            (saved,), (own,) = error.saved, error.expected
            error.add_note(_compare(_saved_ranks(error.file), saved, _ranks, own))


def _saved_ranks(file: str) -> int | None:
    """Return the number of ranks of the job that wrote a snapshot; None if it is not saved."""
    from chainer_compat.npz import open_npz

    with open_npz(file) as saved:
        key = next((key for key in saved if key.endswith(f"/{N_RANKS}")), None)
        return None if key is None else int(saved[key])


def _compare(saved_ranks: int | None, saved_length: int, ranks: int, length: int) -> str:
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
