"""Save the best model of a run."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import chainer
import numpy as np
from chainer.training.extension import PRIORITY_READER, Extension

from chainermn.extensions.npz_files import write_npz
from chainermn.files import atomic_write


class BestModel(Extension):
    """Extension that saves the model whenever an observed value is the best of the run so far.

    The parameters are saved as ``filename`` in the trainer's folder, as by
    ``chainer.serializers.save_npz`` with ``compression=False``. A file with the same name and the
    suffix ``.json`` has the ``metric``, its ``value``, and the ``epoch`` and ``iteration``. Both
    files are always complete, even if the job is killed while it writes.

    Of equal values, the one with the lower loss is better, if the evaluator has reported a loss
    beside it: ``validation/main/loss`` for ``validation/main/accuracy``. It is ``loss`` in the
    JSON file.

    Snapshots of the trainer hold the best value so far, so a resumed run continues from it. If the
    file is not in the trainer's folder, the search for the best starts over.

    Use it on one rank, with the same trigger as the evaluator.

    Parameters
    ----------
    model : chainer.Link
        Model to save.
    metric : str
        Name of the observed value. NaN is never the best value.
    mode : {'max', 'min'}
        Whether a larger or a smaller value is better.
    filename : str
        Name of the file, which must end with ``.npz``.

    Attributes
    ----------
    value : float
        Best value so far; minus or plus infinity at first.
    loss : float
        Its loss; infinity if none was observed.
    epoch, iteration : int
        Epoch and iteration of the best value.

    Raises
    ------
    ValueError
        If ``mode`` or ``filename`` is invalid.

    Examples
    --------
    >>> test_iterator = chainer.iterators.SerialIterator(data, 4, repeat=False, shuffle=False)
    >>> evaluator = training.extensions.Evaluator(test_iterator, model)
    >>> trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    >>> if comm.rank == 0:
    ...     trainer.extend(chainermn.extensions.BestModel(model, "validation/main/accuracy"))
    >>> trainer.run()
    >>> chainer.serializers.load_npz("result/best.npz", model)
    """

    trigger = 1, "epoch"
    priority = PRIORITY_READER  # after evaluators, before the snapshot that holds the best value
    value: float
    loss: float

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
        self._forget()

    def initialize(self, trainer: chainer.training.Trainer) -> None:
        """Forget the best value of a snapshot if its model is not in this folder."""
        if not Path(trainer.out, self.filename).exists():
            self._forget()

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Save the model if it is the best.

        Raises
        ------
        KeyError
            If the value was not observed in this iteration.
        """
        if self.metric not in trainer.observation:
            seen = ", ".join(sorted(trainer.observation)) or "nothing"
            raise KeyError(
                f"BestModel: {self.metric!r} was not observed in iteration "
                f"{trainer.updater.iteration}, but {seen}. Give the evaluator the same trigger"
            )
        value = float(trainer.observation[self.metric])
        prefix, slash, _ = self.metric.rpartition("/")
        beside = f"{prefix}{slash}loss"
        loss = float(trainer.observation.get(beside, math.inf))
        if not (self._sign * value, -loss) > (self._sign * self.value, -self.loss):
            return
        self.value, self.loss = value, math.inf if math.isnan(loss) else loss
        self.epoch, self.iteration = trainer.updater.epoch, trainer.updater.iteration
        file = Path(trainer.out, self.filename)
        write_npz(file, chainer.serializers.npz.serialize(self.model))
        about = {
            "metric": self.metric,
            "value": value,
            **({"loss": self.loss} if math.isfinite(self.loss) else {}),
            "epoch": self.epoch,
            "iteration": self.iteration,
        }
        with atomic_write(file.with_suffix(".json")) as description:
            description.write(json.dumps(about, indent=1) + "\n")

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the best value, and its loss, epoch and iteration."""
        self.value = float(serializer("value", np.float64(self.value)))
        with contextlib.suppress(KeyError):  # older snapshots lack it
            self.loss = float(serializer("loss", np.float64(self.loss)))
        self.epoch = int(serializer("epoch", self.epoch))
        self.iteration = int(serializer("iteration", self.iteration))

    def _forget(self) -> None:
        self.value = -self._sign * math.inf
        self.loss = math.inf
        self.epoch = self.iteration = 0
