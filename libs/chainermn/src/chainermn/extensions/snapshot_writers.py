"""Writers of snapshots that ranks can use."""

from __future__ import annotations

from chainer.training.extension import Extension
from chainer.training.extensions.snapshot_writers import ProcessQueueWriter, ProcessWriter


def check_writer(snapshot: Extension) -> None:
    """Check that a snapshot's writer starts no process, which is not safe after MPI has started.

    Raises
    ------
    ValueError
        If it is a ProcessWriter or a ProcessQueueWriter.
    """
    writer = getattr(snapshot, "writer", None)
    if isinstance(writer, (ProcessWriter, ProcessQueueWriter)):
        name = type(writer).__name__
        raise ValueError(
            f"the snapshot's writer is a {name}, which starts a process after MPI has started; "
            f"use {name.replace('Process', 'Thread')} instead"
        )
