"""What goes on around the steps of training."""

import time
import zipfile
from typing import Any

import chainer
import numpy as np
from chainer.training import Extension, StandardUpdater, Trainer
from chainer.training.extension import PRIORITY_EDITOR

import chainermn

LOSS = "validation/main/loss"  # on rank 0

# The class, and what it calls its learning rate.
OPTIMIZERS = {
    "adam": (chainer.optimizers.Adam, "alpha"),
    "adagrad": (chainer.optimizers.AdaGrad, "lr"),
    "momentum": (chainer.optimizers.MomentumSGD, "lr"),
    "rmsprop": (chainer.optimizers.RMSprop, "lr"),
    "sgd": (chainer.optimizers.SGD, "lr"),
}


class Updater(StandardUpdater):
    """Updater whose random numbers depend on nothing but the seed, the rank and the iteration.

    So a run that goes on from a snapshot drops out the same units as one never interrupted.

    Parameters
    ----------
    iterator, optimizer, converter, device
        As for Chainer's.
    seed, rank : int
    """

    def __init__(
        self,
        iterator: chainer.dataset.Iterator,
        optimizer: chainer.Optimizer,
        converter: object,
        device: chainer.backend.Device,
        seed: int,
        rank: int,
    ) -> None:
        super().__init__(iterator, optimizer, converter=converter, device=device)
        self.seed, self.rank = seed, rank

    def update(self) -> None:
        """Take a step; report its ``seconds``."""
        start = time.perf_counter()
        number = np.random.SeedSequence([self.seed, self.rank, self.iteration]).generate_state(1)
        self.device.xp.random.seed(int(number[0]))
        super().update()
        chainer.report({"seconds": time.perf_counter() - start})


class PlateauDecay(Extension):
    """Multiplies the learning rate by a factor when the validation loss no longer falls.

    Rank 0, which knows the loss, decides for all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    attribute : str
        Of the optimizer: its learning rate.
    rate : float
        To begin with.
    factor : float
    patience : int
        Epochs without a lower loss than ever before, after which the rate is multiplied.
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after the evaluator

    def __init__(
        self,
        comm: chainermn.CommunicatorBase,
        attribute: str,
        rate: float,
        factor: float,
        patience: int,
    ) -> None:
        self.comm, self.attribute, self.rate = comm, attribute, rate
        self.factor, self.patience = factor, patience
        self.best, self.waited = float("inf"), 0

    def initialize(self, trainer: Trainer) -> None:
        """Set the rate, also after resuming."""
        setattr(trainer.updater.get_optimizer("main"), self.attribute, self.rate)

    def __call__(self, trainer: Trainer) -> None:
        """Decide. Collective."""
        if self.comm.rank == 0:
            self._observe(float(trainer.observation[LOSS]))
        self.rate = self.comm.bcast_obj(self.rate)
        self.initialize(trainer)
        chainer.report({"lr": self.rate})

    def _observe(self, loss: float) -> None:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        if self.waited == self.patience:
            self.rate *= self.factor
            self.waited = 0

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write rate, best loss and how long it has not fallen."""
        self.rate = float(serializer("rate", self.rate))
        self.best = float(serializer("best", self.best))
        self.waited = int(serializer("waited", self.waited))


class Fingerprint(Extension):
    """Puts into snapshots which vocabularies they belong to.

    Parameters
    ----------
    digest : str
    """

    trigger = 1, "epoch"
    KEY = "extensions/Fingerprint/digest"

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def __call__(self, trainer: Trainer) -> None:
        """Do nothing."""

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Write it; `check_snapshot` has read it."""
        if isinstance(serializer, chainer.Serializer):
            serializer("digest", np.array(self.digest))


def check_snapshot(path: str, digest: str) -> None:
    """Make sure that a snapshot can be read and belongs to these vocabularies.

    Raises
    ------
    OSError, ValueError
    """
    try:
        with np.load(path) as content:
            found = str(content[Fingerprint.KEY])
    except (KeyError, zipfile.BadZipFile, ValueError):
        raise ValueError(f"{path} is not a snapshot of this program") from None
    if found != digest:
        raise ValueError(
            f"{path} was written with other vocabularies: those of another corpus, or made with "
            "other values of --min-count, --max-vocabulary, --max-length or --share-embedding"
        )


def early_stopping(comm: chainermn.CommunicatorBase, patience: int, epochs: int) -> Any:
    """Return what stops all ranks when the validation loss, which rank 0 knows, stops falling.

    Parameters
    ----------
    comm : CommunicatorBase
    patience : int
        Epochs without a lower loss than ever before.
    epochs : int
        Stop then at the latest.
    """
    return chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        comm,
        monitor=LOSS,
        patience=patience,
        mode="min",
        max_trigger=(epochs, "epoch"),
        suffix="_of_all",
    )


def mean_speed(size: int) -> Any:
    """Return what turns ``seconds`` of a row of a log into ``tokens/s`` of so many ranks."""

    def postprocess(row: dict[str, float]) -> None:
        row["tokens/s"] = size * row["main/tokens"] / row.pop("seconds")

    return postprocess
