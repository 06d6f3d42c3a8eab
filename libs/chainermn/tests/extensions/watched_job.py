"""Train on a terminal: rank 1 warns, then the rank whose number is given, if any, fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from chainer.training import Trainer, make_extension
from trainers import make_trainer

import chainermn
from chainermn.extensions import TerminalReport, terminal_report

# Draw in every iteration, however fast or slow the machine is.
terminal_report._INTERVAL, terminal_report._SHARE = 0, float("inf")
comm = chainermn.create_communicator()
trainer = make_trainer(sys.argv[1], 4)
failing = sys.argv[2]


@make_extension(priority=-1)
def warn_and_fail(trainer: Trainer) -> None:
    """Warn, hold all ranks until the terminal shows the warning, and fail if told to."""
    iteration = trainer.updater.iteration
    if (iteration, comm.rank) == (4, 1):
        print("a rank has something to say,\nin two lines", file=sys.stderr, flush=True)
        while not Path(sys.argv[1], "it is shown").exists():
            time.sleep(0.01)
    comm.mpi_comm.Barrier()
    if (iteration, str(comm.rank)) == (8, failing):
        raise ValueError("wrong")


trainer.extend(warn_and_fail)
if comm.rank == 0:
    trainer.extend(TerminalReport(["epoch", "loss"]))
trainer.run()
