"""A job in which the last rank comes late: ``held_back.py HOW FOLDER``.

``at the start``: it waits for a file ``come`` in the folder. A file ``all`` shows that all ranks
train, which they do until there is a file ``over``. ``with a part``: it comes after the others
have trained with their own communicator, and is then killed. ``never``: it cannot connect to the
watch.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

import chainermn
from chainermn.failures.settings import WatchSettings
from chainermn.failures.watch import Watch


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
    if how == "never":
        if is_last:
            WatchSettings.connect = lambda *_: None  # type: ignore[method-assign, assignment]
        comm = chainermn.create_communicator("naive")
        watches = [each for each in threading.enumerate() if isinstance(each, Watch)]
        while comm.rank == 0 and is_open(watches[0]):
            pass
        return
    while is_last and not (folder / "come").exists():
        time.sleep(0.01)
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        (folder / "all").touch()
    train(comm, folder / "over")


def is_open(watched: Watch) -> bool:
    """Tell whether a watch's monitor is still listening."""
    with socket.socket() as stranger:
        return stranger.connect_ex(watched.settings.endpoint.addresses[0]) == 0


def train(comm: chainermn.CommunicatorBase, until: Path) -> None:
    """Add up numbers until a file exists."""
    number, is_over = 0, False
    while not is_over:
        number += 1
        numbers = comm.allreduce(np.full(1000, number, np.float32))
        assert (numbers == number * comm.size).all()
        is_over = comm.bcast_obj(until.exists())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
