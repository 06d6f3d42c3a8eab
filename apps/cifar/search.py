#!/usr/bin/env python3
"""Search for the best hyperparameters of a network."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np
from chainer.training import Extension, Trainer, extensions
from chainer.training.extension import PRIORITY_EDITOR
from optuna.trial import TrialState

import chainermn
import data
import training
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import BestModel, record_run
from chainermn.progress import silence
from search_reports import Table, print_summary
from study import Study

# A study can be continued with other values of these.
FREE = training.FREE | {"trials", "ranks_per_trial", "quiet"}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.quiet:
        silence()
    comm, device = training.start(args)
    with exit_together(comm):
        sources = args.dataset, args.data, args.examples
        images = run_on_root(comm, 0, "data", lambda: data.load(*sources))
        run_on_root(comm, 0, "study", lambda: prepare_study(args, images))
        group = split(comm, args.ranks_per_trial)
    study = Study(Path(args.out), args.trials, args.seed) if group.rank == 0 else None
    table = Table(study) if comm.rank == 0 else None

    while asked := run_on_root(group, 0, "ask", lambda: study.ask()):
        number, values = asked
        trial = argparse.Namespace(**{**vars(args), **values, "out": folder(args.out, number)})
        train(trial, group, device, images, study)
        if comm.rank == 0:
            table.print_new_rows()

    comm.mpi_comm.Barrier()  # the other groups are still training
    if comm.rank == 0:
        table.print_new_rows()
        print_summary(study, Path(args.out))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    training.add_arguments(parser, epoch=5)
    add = parser.add_argument
    add("--trials", "-t", type=int, default=10, help="trials in the finished study")
    per_trial = "ranks that train a trial together; default: all"
    add("--ranks-per-trial", type=int, metavar="N", help=per_trial)
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    return training.checked(parser, argv)


def prepare_study(args: argparse.Namespace, images: data.Images) -> None:
    """Make the study, or continue the existing one, which no other job may use."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for lock in out.glob("*.lock"):  # of a job that was killed
        lock.unlink()
    study = Study(out, args.trials, args.seed)
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    study.check(settings | images.settings())
    study.repeat_lost()


def split(comm: chainermn.CommunicatorBase, size: int | None) -> chainermn.CommunicatorBase:
    """Return the communicator of this rank's group; all groups are equally large. Collective.

    Raises
    ------
    ValueError
        If the ranks cannot be divided like this.
    """
    size = size or comm.size
    if comm.size % size:
        raise ValueError(f"--ranks-per-trial must divide the number of ranks, {comm.size}")
    return comm.split(comm.rank // size, comm.rank)


def folder(out: str, number: int) -> str:
    """Return the folder of a trial."""
    return str(Path(out, f"trial_{number:03}"))


def train(
    args: argparse.Namespace,
    comm: chainermn.CommunicatorBase,
    device: chainer.backend.Device,
    images: data.Images,
    study: Study | None,
) -> None:
    """Train a trial on the ranks of a group, and tell the study how it ended. Collective."""
    trainer, network = training.create_trainer(args, comm, device, images)
    verdict = Verdict(comm, study, args.epoch)
    trainer.extend(verdict)
    trainer.stop_trigger = verdict.is_over
    best = BestModel(network, training.ACCURACY)
    if comm.rank == 0:
        trainer.extend(best)
        trainer.extend(extensions.LogReport())
    record_run(comm, {**vars(args), "classes": images.classes}, args.out)
    with np.errstate(all="ignore"):  # an infinite value ends the trial
        trainer.run()
    run_on_root(comm, 0, "tell", lambda: study.tell(verdict.state, best.value))


class Verdict(Extension):
    """Ends a trial on all of its ranks after the same epoch: rank 0, which has the study, decides.

    Parameters
    ----------
    comm : CommunicatorBase
    study : Study or None
        The study on rank 0, None on other ranks.
    epochs : int
        Number of epochs after which a trial is complete, unless it is given up.

    Attributes
    ----------
    state : optuna.trial.TrialState
        How the trial ends if it ends now; the same on all ranks.
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after the evaluator

    def __init__(self, comm: chainermn.CommunicatorBase, study: Study | None, epochs: int) -> None:
        self.comm, self.study, self.epochs = comm, study, epochs
        self.state = TrialState.COMPLETE

    def __call__(self, trainer: Trainer) -> None:
        """Decide at the end of an epoch. Collective."""

        def decide() -> TrialState:
            seen = (float(trainer.observation[key]) for key in (training.LOSS, training.ACCURACY))
            return self.study.report(trainer.updater.epoch, *seen)

        self.state = run_on_root(self.comm, 0, "report", decide)

    def is_over(self, trainer: Trainer) -> bool:
        """Tell whether the trial ends now; the trigger that stops the trainer."""
        return self.state != TrialState.COMPLETE or trainer.updater.epoch >= self.epochs


if __name__ == "__main__":
    main()
