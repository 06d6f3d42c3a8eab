"""Print each rank's number, and a sum over all ranks."""

from __future__ import annotations

import os
import sys

import numpy as np

import chainermn

comm = chainermn.create_communicator(sys.argv[1] if len(sys.argv) > 1 else "naive")
total = comm.allreduce(np.array([comm.rank + 1.0], np.float32))
line = f"rank {comm.rank} of {comm.size} on host {comm.inter_rank} sum {total[0]:g}\n"
os.write(1, line.encode())  # in one piece
