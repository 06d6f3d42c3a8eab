"""A training script in which rank 1 fails in the way that is asked for, while rank 0 waits.

``fail.py HOW [RANK]``: RANK fails instead of rank 1.
"""

import ctypes
import os
import signal
import sys
import time

import numpy as np


def launched_rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def fail(how: str, comm) -> None:
    if how == "raise":
        raise RuntimeError("by design")
    if how.startswith("sys.exit"):
        sys.exit(int(how[-1]))
    if how == "os._exit":
        os._exit(0)
    if how == "segmentation fault":
        ctypes.string_at(0)
    if how in ("recv", "recv on both"):
        comm.recv_obj(1 - comm.rank)
    if how == "compute":
        time.sleep(4)
    if how in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, how))


def main(how: str, who: str = "1") -> None:
    # Python ignores interrupts where its parent does, as shells make jobs in the background do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if how == "early exit" and launched_rank() == int(who):
        time.sleep(1)
        sys.exit(0)
    import chainermn

    comm = chainermn.create_communicator("naive")
    comm.allreduce(np.ones(3))
    print("started", flush=True)
    if how == "regular":
        if comm.rank == 0:
            comm.send_obj("the last message", 1)
            time.sleep(1.5)
        else:
            comm.recv_obj(0)
        sys.exit(7)
    if how == "all raise":
        raise RuntimeError("by design")
    if how == "wait":
        comm.recv_obj(1 - comm.rank)
    if comm.rank == int(who):
        fail(how, comm)
    elif how == "recv on both":
        comm.recv_obj(1 - comm.rank)
    comm.allreduce(np.ones(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
