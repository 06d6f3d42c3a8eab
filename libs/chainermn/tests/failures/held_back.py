"""Two of three ranks train, which the last one joins late: ``held_back.py FOLDER``.

The file ``port`` says where the watch listens until then. The last rank comes once there is a file
``come``, and training goes on until there is a file ``over``.
"""

import sys
import time
from pathlib import Path

import numpy as np

import chainermn
from chainermn.failures import watch


def main(folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    last = world.size - 1
    part = world.Split(int(world.rank == last))
    if world.rank == last:
        while not (folder / "come").exists():
            time.sleep(0.01)
    else:
        comm = chainermn.create_communicator("naive", part)
        if comm.rank == 0:
            assert watch._watch is not None
            ((_, port),) = watch._watch.invitation.entrance.addresses
            (folder / "writing").write_text(str(port))
            (folder / "writing").rename(folder / "port")
        train(comm, folder / "come")
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
    main(Path(sys.argv[1]))
