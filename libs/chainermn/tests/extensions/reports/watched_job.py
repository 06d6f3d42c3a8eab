"""Train twice on a terminal: rank 1 warns in the first training, and fails in the second."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from chainer.training import Trainer, make_extension
from trainers import make_trainer

import chainermn
from chainermn.extensions import TerminalReport

comm = chainermn.create_communicator()
folder = Path(sys.argv[1])


def wait_until_shown(what: str) -> None:
    """Wait until the terminal shows something, which the test tells by a file."""
    while not (folder / what).exists():
        time.sleep(0.01)


@make_extension(priority=-1)
def warn(trainer: Trainer) -> None:
    """Warn on rank 1 in the first iteration, which is always drawn, and hold all ranks."""
    if (trainer.updater.iteration, comm.rank) == (1, 1):
        print("a rank has something to say,\nin two lines", file=sys.stderr, flush=True)
        wait_until_shown("warning")
    comm.mpi_comm.Barrier()


@make_extension(priority=-1)
def fail(_: Trainer) -> None:
    """Fail on rank 1 below a whole drawing, while the others wait."""
    if comm.rank == 1:
        wait_until_shown("drawing")
        raise ValueError("wrong")
    comm.mpi_comm.Barrier()


for extension in (warn, fail):
    trainer = make_trainer(folder, 4)
    trainer.extend(extension)
    if comm.rank == 0:
        trainer.extend(TerminalReport(["epoch", "loss"]))
    trainer.run()
