"""Share memory with the other ranks; one rank is killed before it runs a line of that code.

``python die_while_sharing.py RANK NUMBER``: before the NUMBER-th line, counted from 1.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from mpi4py import MPI

from chainermn.transport.host import memory

dying, left = map(int, sys.argv[1:])


def count(frame: FrameType, event: str, argument: object) -> Any:
    global left
    if frame.f_code.co_filename != memory.__file__:
        return None
    if event == "line":
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    return count


if dying == MPI.COMM_WORLD.rank:
    sys.settrace(count)
shared = memory.share_memory(MPI.COMM_WORLD, 1 << 20)
sys.settrace(None)
assert not isinstance(shared, str), shared
