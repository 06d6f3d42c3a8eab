"""The last rank comes late: ``held_back.py HOW FOLDER``.

``at the start``: it comes once there is a file ``come`` in the folder. A file ``all`` says that
all train, until there is a file ``over``. ``with a part``: the others have a communicator of their
own before it comes; then it is killed.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import chainermn


def main(how: str, folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    is_last = world.rank == world.size - 1
    if how == "with a part":
        part = world.Split(int(is_last))
        if not is_last:
            train(chainermn.create_communicator("naive", part), folder)
        comm = chainermn.create_communicator("naive")
        train(comm, folder)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        train(comm, folder / "never")
    while is_last and not (folder / "come").exists():
        time.sleep(0.01)
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        (folder / "all").touch()
    train(comm, folder / "over")


def train(comm: chainermn.CommunicatorBase, until: Path) -> None:
    """Add up numbers until there is a file."""
    number, is_over = 0, False
    while not is_over:
        number += 1
        numbers = comm.allreduce(np.full(1000, number, np.float32))
        assert (numbers == number * comm.size).all()
        is_over = comm.bcast_obj(until.exists())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
