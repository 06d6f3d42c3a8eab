"""Where each rank of a job runs, and which environment it has there."""

from __future__ import annotations

import os
import socket
from typing import Any


def examine() -> list[dict[str, Any]] | None:
    """Return, on rank 0, in the order of the ranks: host name and environment variables."""
    from mpi4py import MPI

    mine = {"host": socket.gethostname(), "environment": dict(os.environ)}
    everywhere = MPI.COMM_WORLD.gather(mine)
    return None if everywhere is None else list(everywhere)
