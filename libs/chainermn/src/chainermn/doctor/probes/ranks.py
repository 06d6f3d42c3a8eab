"""What each rank of a job sees: host, environment, thread level."""

from __future__ import annotations

import os
import socket
from typing import Any


def examine() -> list[dict[str, Any]] | None:
    """Return, on rank 0, what each rank sees, in the order of the ranks."""
    from mpi4py import MPI

    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in names}
    mine = {
        "host": socket.gethostname(),
        "environment": dict(os.environ),
        "thread level": levels[MPI.Query_thread()],
    }
    return MPI.COMM_WORLD.gather(mine)
