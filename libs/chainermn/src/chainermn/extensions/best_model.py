"""Keep the best model of a run, whatever becomes of its snapshots."""

from __future__ import annotations

import json
import math
from pathlib import Path

import chainer
import numpy as np
from chainer.training.extension import PRIORITY_READER, Extension

from chainermn.extensions.npz_files import write_npz
from chainermn.files import atomic_write


class BestModel(Extension):
    """Writes a model whenever an observed value is better than ever before in the run.

    The parameters go into ``filename`` in the trainer's folder, as
    ``chainer.serializers.save_npz`` writes them with ``compression=False``. A file of the same
    name that ends with ``.json`` says how good they are: ``metric``, ``value``, ``epoch`` and
    ``iteration``. Either file is always complete, also if the job is killed while it is written.
    Snapshots of the trainer hold the best value so far, from which a resumed run goes on; in
    another folder than the file's it begins anew.

    Use it on one rank, after the evaluator, with the same trigger:
    ``if comm.rank == 0: trainer.extend(BestModel(model, 'validation/main/accuracy'))``.

    Parameters
    ----------
    model : chainer.Link
    metric : str
        The observed value. A value that is not a number is never the best.
    mode : {'max', 'min'}
        Whether it should rise or fall.
    filename : str
        Ends with ``.npz``.

    Attributes
    ----------
    value : float
        The best so far; minus or plus infinity at first.
    epoch, iteration : int
        When it was reached.

    Raises
    ------
    ValueError
        If ``mode`` or ``filename`` is anything else.
    """

    trigger = 1, "epoch"
    priority = PRIORITY_READER  # after evaluators, before the snapshot that holds the best value

    def __init__(
        self,
        model: chainer.Link,
        metric: str,
        mode: str = "max",
        filename: str = "best.npz",
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f"BestModel: mode must be 'max' or 'min', got {mode!r}")
        if not filename.endswith(".npz"):
            raise ValueError(f"BestModel: filename must end with .npz, got {filename!r}")
        self.model, self.metric, self.filename = model, metric, filename
        self._sign = 1 if mode == "max" else -1
        self.value = -self._sign * math.inf
        self.epoch = self.iteration = 0

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Forget the best value of a snapshot from elsewhere, whose model is not here."""
        if not Path(trainer.out, self.filename).exists():
            self.value = -self._sign * math.inf
            self.epoch = self.iteration = 0

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Write the model if it is the best.

        Raises
        ------
        KeyError
            If the value has not been observed in this iteration.
        """
        if self.metric not in trainer.observation:
            seen = ", ".join(sorted(trainer.observation)) or "nothing"
            raise KeyError(
                f"BestModel: {self.metric!r} was not observed in iteration "
                f"{trainer.updater.iteration}, but {seen}. Give the evaluator the same trigger"
            )
        value = float(trainer.observation[self.metric])
        if not self._sign * value > self._sign * self.value:
            return
        self.value = value
        self.epoch, self.iteration = trainer.updater.epoch, trainer.updater.iteration
        file = Path(trainer.out, self.filename)
        write_npz(file, chainer.serializers.npz.serialize(self.model))
        about = {
            "metric": self.metric,
            "value": value,
            "epoch": self.epoch,
            "iteration": self.iteration,
        }
        with atomic_write(file.with_suffix(".json")) as description:
            description.write(json.dumps(about, indent=1) + "\n")

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the best value and when it was reached."""
        self.value = float(serializer("value", np.float64(self.value)))
        self.epoch = int(serializer("epoch", self.epoch))
        self.iteration = int(serializer("iteration", self.iteration))
