"""Learning rate and early stopping."""

import chainer
from chainer.training import Extension, Trainer
from chainer.training.extension import PRIORITY_EDITOR

import chainermn

# The class, and its name for the learning rate.
OPTIMIZERS = {
    "adam": (chainer.optimizers.Adam, "alpha"),
    "adagrad": (chainer.optimizers.AdaGrad, "lr"),
    "momentum": (chainer.optimizers.MomentumSGD, "lr"),
    "rmsprop": (chainer.optimizers.RMSprop, "lr"),
    "sgd": (chainer.optimizers.SGD, "lr"),
}

# Criteria on the validation data, and whether they should fall or rise.
CRITERIA = {"loss": "min", "exact": "max", "bleu": "max", "chrf": "max"}


def observation(criterion: str) -> str:
    """Return the name of a criterion in rank 0's observation."""
    return f"validation/main/{criterion}"


class Patience:
    """Counts the epochs since a criterion was at its best.

    Parameters
    ----------
    criterion : str
        One of `CRITERIA`.

    Attributes
    ----------
    waited : int
        Number of epochs since the best one.
    """

    def __init__(self, criterion: str) -> None:
        self._sign = 1 if CRITERIA[criterion] == "max" else -1
        self.best, self.waited = float("-inf"), 0  # best: with the sign

    def observe(self, value: float) -> None:
        """Record the criterion at the end of an epoch."""
        self.waited = 0 if self._sign * value > self.best else self.waited + 1
        self.best = max(self.best, self._sign * value)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write the best value and how long there has been no better one."""
        self.best = float(serializer("best", self.best))
        self.waited = int(serializer("waited", self.waited))


class LearningRate(Extension):
    """Sets the learning rate of every step: a warm-up, then less after each plateau.

    On a plateau the criterion does not reach a new best value. Rank 0, which knows the
    criterion, decides for all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
    attribute : str
        Attribute of the optimizer that holds its learning rate.
    rate : float
        Learning rate after the warm-up.
    warmup : int
        Number of steps in which the rate rises linearly.
    factor : float
        Factor for the rate after a plateau.
    patience : int
        Number of epochs without a new best value that make a plateau.
    criterion : str
        One of `CRITERIA`.
    """

    trigger = 1, "iteration"
    priority = PRIORITY_EDITOR  # after the evaluator

    def __init__(
        self,
        comm: chainermn.CommunicatorBase,
        attribute: str,
        rate: float,
        warmup: int,
        factor: float,
        patience: int,
        criterion: str,
    ) -> None:
        self.comm, self.attribute, self.rate, self.warmup = comm, attribute, rate, warmup
        self.factor, self.patience, self.criterion = factor, patience, criterion
        self._counted = Patience(criterion)

    def initialize(self, trainer: Trainer) -> None:
        """Set the rate of the first step, also after resuming."""
        self._set(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Set the rate of the next step. Collective."""
        if trainer.updater.is_new_epoch:
            if self.comm.rank == 0:
                self.observe(float(trainer.observation[observation(self.criterion)]))
            self.rate = self.comm.bcast_obj(self.rate)
            chainer.report({"lr": self.rate})
        self._set(trainer)

    def observe(self, value: float) -> None:
        """Record the criterion at the end of an epoch."""
        self._counted.observe(value)
        if self._counted.waited == self.patience:
            self.rate *= self.factor
            self._counted.waited = 0

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write rate, best value and how long there has been no better one."""
        self.rate = float(serializer("rate", self.rate))
        self._counted.serialize(serializer)

    def _set(self, trainer: Trainer) -> None:
        step = trainer.updater.iteration + 1
        rate = self.rate * min(1, step / max(self.warmup, 1))
        setattr(trainer.updater.get_optimizer("main"), self.attribute, rate)


class EarlyStopping(Extension):
    """Ends training when a criterion stops improving. Rank 0, which knows it, decides for all.

    Unlike Chainer's trigger, it records an epoch before the snapshot of its end is
    written, so a resumed run ends in the same epoch as one without interruption.

    Parameters
    ----------
    comm : CommunicatorBase
    criterion : str
        One of `CRITERIA`.
    patience : int
        Number of epochs without a new best value after which training ends.

    Attributes
    ----------
    is_over : bool
        Whether training is over; the same on all ranks.
    """

    trigger = 1, "epoch"
    priority = PRIORITY_EDITOR  # after the evaluator

    def __init__(self, comm: chainermn.CommunicatorBase, criterion: str, patience: int) -> None:
        self.comm, self.criterion, self.patience = comm, criterion, patience
        self._counted = Patience(criterion)
        self.is_over = False

    def __call__(self, trainer: Trainer) -> None:
        """Record the criterion at the end of an epoch. Collective."""
        if self.comm.rank == 0:
            self._counted.observe(float(trainer.observation[observation(self.criterion)]))
        self.is_over = self.comm.bcast_obj(self._counted.waited >= self.patience)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Read or write best value, how long there has been no better one, and the decision."""
        self._counted.serialize(serializer)
        self.is_over = bool(serializer("is_over", self.is_over))


class End:
    """Trigger of the end of training: by early stopping, or after ``epochs`` epochs.

    Parameters
    ----------
    stopping : EarlyStopping
    epochs : int
    """

    def __init__(self, stopping: EarlyStopping, epochs: int) -> None:
        self.stopping, self.epochs = stopping, epochs

    def __call__(self, trainer: Trainer) -> bool:
        """Tell whether training is over."""
        return self.stopping.is_over or trainer.updater.epoch >= self.epochs

    def get_training_length(self) -> tuple[int, str]:
        """Return the longest possible training."""
        return self.epochs, "epoch"
