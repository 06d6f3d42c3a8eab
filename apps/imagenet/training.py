"""A training step: its loss, its learning rate, and the weights that it changes."""

import copy
import math
from collections.abc import Iterable

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.optimizer_hooks import WeightDecay
from chainer.training import Extension, Trainer

from chainermn.global_except_hook import exit_job

# As GoogLeNet's paper weights its auxiliary classifiers.
AUXILIARY_WEIGHT = 0.3


class Classifier(chainer.Chain):
    """A network with its training loss.

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
        """Return the mean loss of a batch; report it and the accuracy.

        Parameters
        ----------
        x : array
            Images, of shape (batch, 3, height, width).
        t : array of int32
            Their classes.
        """
        if len(t) == 0:
            exit_job("none of the images of a batch can be read")
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


class LearningRate(Extension):
    """Sets the learning rate of every step: a warm-up, then the schedule.

    Parameters
    ----------
    peak : float
        Rate at the end of the warm-up.
    epochs : int
        Number of epochs of the whole training.
    warmup : float
        Number of epochs in which the rate rises to its peak (Goyal et al., 2017).
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


class EpochOrInterval:
    """Trigger at the end of each epoch, and at intervals of iterations.

    Unlike Chainer's own triggers, it has no state, so a snapshot may come from a run whose
    extension had another trigger.

    Parameters
    ----------
    iterations : int
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def __call__(self, trainer: Trainer) -> bool:
        """Tell whether the trigger fires."""
        updater = trainer.updater
        return updater.is_new_epoch or updater.iteration % self.iterations == 0


class MovingAverage(Extension):
    """Averages the weights of all steps, mostly of the latest (Polyak and Juditsky, 1992).

    At the beginning, when the weights change fast, the average is taken over fewer steps. The
    statistics of batch normalization are copied as they are.

    Parameters
    ----------
    average : chainer.Link
        Network that gets the averaged weights.
    network : chainer.Link
        Network of the same kind, which is trained.
    decay : float
        Share of the average that each step keeps, such as 0.999.
    """

    trigger = 1, "iteration"
    priority = chainer.training.PRIORITY_WRITER  # after AllreducePersistent

    def __init__(self, average: chainer.Link, network: chainer.Link, decay: float) -> None:
        self.average, self.network, self.decay = average, network, decay

    def __call__(self, trainer: Trainer) -> None:
        """Add the weights of a step."""
        steps = trainer.updater.iteration - 1
        new = 1 - min(self.decay, steps / (steps + 9))
        for mean, one in zip(self.average.params(), self.network.params(), strict=True):
            if one.array is not None:
                if mean.array is None:  # until the first step, a layer may not know its input
                    mean.initialize(one.shape)
                mean.array += new * (one.array - mean.array)
        for mean, one in zip(self.average.links(), self.network.links(), strict=True):
            for name in one._persistent:
                setattr(mean, name, copy.copy(getattr(one, name)))

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the average."""
        self.average.serialize(serializer["average"])


class _Still(chainer.LinkHook):
    """Makes a layer compute as in evaluation, even while others are trained."""

    name = "Still"

    def forward_preprocess(self, args: object) -> None:
        self.train, chainer.config.train = chainer.config.train, False

    def forward_postprocess(self, args: object) -> None:
        chainer.config.train = self.train


def freeze(network: chainer.Chain, layers: Iterable[str]) -> None:
    """Freeze layers, including the statistics of their batch normalization.

    Parameters
    ----------
    network : chainer.Chain
    layers : iterable of str
        Names of its layers, or of groups of these.

    Raises
    ------
    ValueError
        If the network has no such layer.
    """
    known = {child.name: child for child in network.children()}
    for layer in layers:
        if layer not in known:
            raise ValueError(f"--freeze: there is no layer {layer!r}, but {', '.join(known)}")
        known[layer].disable_update()
        for link in known[layer].links():
            if isinstance(link, L.BatchNormalization):
                link.add_hook(_Still())


def add_weight_decay(model: chainer.Link, rate: float) -> None:
    """Apply weight decay to weights, but not to biases or scales of batch normalization."""
    for name, parameter in model.namedparams():
        if name.endswith("/W"):
            parameter.update_rule.add_hook(WeightDecay(rate))
