#!/usr/bin/env python3
"""Find a learning rate: raise it step by step, and see how the loss falls.

Takes train.py's arguments, of which some have no effect here, such as --epoch and --lr.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import chainer
import numpy as np

import batches
import chainermn
import data
import job
import options
import reports
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import StepSeed
from chainermn.progress import Progress

IMAGES = 256  # in a step, that --lr is for


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    comm, device = job.start(args)
    with exit_together(comm):
        check(args)
        train, validation, about, inspection = job.load_lists(args, comm)
        run_on_root(comm, 0, "--out", lambda: Path(args.out).mkdir(parents=True, exist_ok=True))
    network = job.create_network(args, comm, about)
    _, optimizer = job.create_model(network, args, comm, device)
    with exit_together(comm):
        iterators = batches.create_iterators(args, comm, train, validation, about)
    training_batches, validation_batches = iterators
    validation_batches.finalize()
    to_batch = data.ToBatch(about["mean"], about["deviation"], args.skip_unreadable)
    updater = chainer.training.StandardUpdater(training_batches, optimizer, to_batch, device)
    rates = np.geomspace(args.lowest, args.highest, args.steps)
    test = RangeTest(rates, args.batchsize * comm.size / IMAGES, comm)
    trainer = chainer.training.Trainer(updater, lambda trainer: test.is_over, out=args.out)
    trainer.extend(StepSeed(args.seed, comm))
    trainer.extend(test)
    trainer.extend(inspection)
    trainer.run()
    reports.SkippedFiles(comm, to_batch)()
    with exit_together(comm):
        run_on_root(comm, 0, "lr_range.py", lambda: report(rates, test.losses, Path(args.out)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, notes = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=notes)
    add = parser.add_argument
    add("--lowest", type=float, default=1e-4, help="lowest --lr to try; default: %(default)s")
    add("--highest", type=float, default=10, help="highest --lr to try; default: %(default)s")
    steps = "training steps from lowest to highest; default: %(default)s"
    add("--steps", type=int, default=100, help=steps)
    return options.parse_arguments(parser, argv)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the rates make no sense."""
    if not 0 < args.lowest < args.highest:
        limits = f"{args.lowest} and {args.highest}"
        raise ValueError(f"--lowest must be above 0 and below --highest, got {limits}")
    if args.steps < 20:
        raise ValueError(f"--steps must be at least 20, got {args.steps}")


class RangeTest(chainer.training.Extension):
    """Takes one step with each learning rate (Smith, 2017), until the loss diverges.

    Parameters
    ----------
    rates : array of float
        Rates to try, as given to ``--lr``.
    factor : float
        Factor that turns each of them into the optimizer's rate.
    comm : CommunicatorBase

    Attributes
    ----------
    losses : list of float
        Loss of each step so far, as the mean over all ranks.
    """

    trigger = 1, "iteration"

    def __init__(self, rates: np.ndarray, factor: float, comm: chainermn.CommunicatorBase) -> None:
        self.rates, self.factor, self.comm = rates, factor, comm
        self.losses = []
        self.progress = Progress(len(rates), "learning rates") if comm.rank == 0 else None

    @property
    def is_over(self) -> bool:
        """Whether all rates have been tried, or the last loss is over four times the smallest."""
        if not self.losses:
            return False
        last = self.losses[-1]
        return (
            len(self.losses) == len(self.rates)
            or not math.isfinite(last)
            or last > 4 * min(self.losses)
        )

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Set the first rate."""
        trainer.updater.get_optimizer("main").lr = self.factor * self.rates[0]

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Note the loss, and set the next rate."""
        loss = float(trainer.observation["main/loss"].array)
        self.losses.append(self.comm.allreduce_obj(loss) / self.comm.size)
        if self.progress:
            self.progress.step()
        if not self.is_over:
            optimizer = trainer.updater.get_optimizer("main")
            optimizer.lr = self.factor * self.rates[len(self.losses)]


def smooth(losses: np.ndarray) -> np.ndarray:
    """Return the mean of each loss and its neighbors, a twentieth of all losses on either side."""
    n = max(1, len(losses) // 20)
    sums = np.concatenate([[0], np.cumsum(losses)])
    begin = np.maximum(np.arange(len(losses)) - n, 0)
    end = np.minimum(np.arange(len(losses)) + n + 1, len(losses))
    return (sums[end] - sums[begin]) / (end - begin)


def suggest(rates: np.ndarray, losses: np.ndarray) -> float | None:
    """Return the rate with the smallest loss: up to it, higher rates learn faster.

    Smith makes it the largest rate of a schedule, and that is what ``--lr`` is. None if the loss
    does not fall.
    """
    best = int(smooth(losses).argmin())
    return float(rates[best]) if best else None


def report(rates: np.ndarray, losses: list[float], out: Path) -> None:
    """Draw the losses, and say which rate is suggested.

    Raises
    ------
    ValueError
        If the loss does not fall, or is not a number at the first rate.
    """
    known = np.array([loss for loss in losses if math.isfinite(loss)])
    if len(known) == 0:
        raise ValueError("the loss is not a number at the first rate: try a smaller --lowest")
    tried = rates[: len(known)]
    best = suggest(tried, known)
    draw(tried, known, best, out / "lr_range.png")
    print(f"curve: {(out / 'lr_range.png').resolve()}")
    if best is None:
        raise ValueError("the loss does not fall at any rate: try others with --lowest, --highest")
    if len(losses) < len(rates):
        print(f"stopped at --lr {rates[len(losses) - 1]:.2g}, where the loss ran away")
    if best == rates[-1]:
        print("the loss still falls at the last rate: try a larger --highest")
    print(f"suggestion: --lr {best:.2g}, where the loss is least")


def draw(rates: np.ndarray, losses: np.ndarray, best: float | None, path: Path) -> None:
    """Write a picture of the losses over the rates, with the suggestion marked if there is one."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")  # draws into files, even without a screen
    figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.semilogx(rates, losses, color="lightgray", label="loss of each step")
    axes.semilogx(rates, smooth(losses), label="mean of neighbors")
    if best is not None:
        axes.axvline(best, color="C1", linestyle="--", label=f"suggestion: {best:.2g}")
    axes.set_ylim(top=1.1 * max(losses[0], np.median(losses)))
    axes.set_xlabel("learning rate (--lr, for 256 images in a step)")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
