"""What a step of training is: its loss, its learning rate, its random numbers."""

import math
import time

import chainer
import chainer.functions as F
import numpy as np
from chainer.training import Extension, StandardUpdater, Trainer

# As GoogLeNet's paper weights its auxiliary classifiers.
AUXILIARY_WEIGHT = 0.3


class Classifier(chainer.Chain):
    """A network with the loss that it is trained by.

    Parameters
    ----------
    predictor : chainer.Link
        See `models`.
    smoothing : float
        Share of the target that is spread over all classes (Szegedy et al., 2016).
    """

    def __init__(self, predictor: chainer.Link, smoothing: float = 0) -> None:
        super().__init__()
        self.smoothing = smoothing
        with self.init_scope():
            self.predictor = predictor

    def forward(self, x: np.ndarray, t: np.ndarray) -> chainer.Variable:
        """Return the mean loss of a batch; report it, and the share that is right.

        Parameters
        ----------
        x : array
            Images, of shape (batch, 3, height, width).
        t : array of int32
            Their classes.
        """
        if len(t) == 0:
            raise OSError("none of the images of a batch can be read")
        scores = self.predictor(x)
        auxiliary = ()
        if isinstance(scores, tuple):
            scores, *auxiliary = scores
        loss = self.loss(scores, t)
        for other in auxiliary:
            loss += AUXILIARY_WEIGHT * self.loss(other, t)
        chainer.report({"loss": loss, "accuracy": F.accuracy(scores, t)}, self)
        return loss

    def loss(self, scores: chainer.Variable, t: np.ndarray) -> chainer.Variable:
        """Return the cross entropy, of shape () and dtype float32."""
        log_p = F.log_softmax(F.cast(scores, np.float32))
        loss = -F.mean(F.select_item(log_p, t))
        if self.smoothing == 0:
            return loss
        return (1 - self.smoothing) * loss - self.smoothing * F.mean(log_p)


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


class LearningRate(Extension):
    """Sets the learning rate of every step: a warm-up, then the schedule.

    Parameters
    ----------
    peak : float
        At the end of the warm-up.
    epochs : int
        Of the whole training.
    warmup : float
        Epochs in which the rate rises to its peak (Goyal et al., 2017).
    schedule : {'cosine', 'step'}
        ``cosine`` falls to zero; ``step`` to a tenth after 1/3, 2/3 and 8/9 of the epochs.
    """

    trigger = 1, "iteration"
    STEPS = (1 / 3, 2 / 3, 8 / 9)

    def __init__(self, peak: float, epochs: int, warmup: float, schedule: str) -> None:
        self.peak, self.epochs, self.warmup, self.schedule = peak, epochs, warmup, schedule

    def at(self, epoch: float) -> float:
        """Return the rate of the step that starts when ``epoch`` epochs are over."""
        if epoch < self.warmup:
            return self.peak * (0.1 + 0.9 * epoch / self.warmup)
        if self.schedule == "step":
            return self.peak * 0.1 ** sum(epoch >= step * self.epochs for step in self.STEPS)
        done = min((epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9), 1)
        return self.peak * (1 + math.cos(math.pi * done)) / 2

    def initialize(self, trainer: Trainer) -> None:
        """Set the rate of the first step, also after resuming."""
        self(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Set the rate of the next step."""
        trainer.updater.get_optimizer("main").lr = self.at(trainer.updater.epoch_detail)
