"""Stop early on all ranks, in the same iteration."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.training.triggers import EarlyStoppingTrigger

from chainermn.agreement import run_on_root
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.observation_aggregator import ObservationAggregator


class MultiNodeEarlyStoppingTrigger:
    """Stop trigger that ends training when a value, averaged over ranks, stops improving.

    Use it as the ``stop_trigger`` of the trainer on every rank. Rank 0 decides, so all ranks stop
    together even if their epochs end in different iterations.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    check_trigger : (int, 'epoch' or 'iteration')
        Interval of the checks. A check compares the mean of the values since the last check with
        the best mean so far.
    monitor : str
        Name of the observed value, such as ``'main/loss'`` or ``'validation/main/loss'``.
    patience : int, optional
        Number of checks in a row without an improvement after which training stops; 3 by
        default. ``patients`` is an alias.
    mode : {'auto', 'min', 'max'}
        Whether a smaller or a larger value is better. ``'auto'`` means larger if ``monitor``
        contains ``'accuracy'``, otherwise smaller.
    verbose : bool
        Whether rank 0 prints the result of each check.
    max_trigger : (int, 'epoch' or 'iteration')
        Length of the training if it does not stop early.
    suffix : str
        Suffix of the name under which the mean over the ranks is reported: ``monitor + suffix``.

    Notes
    -----
    Snapshots of the trainer hold the best value and the number of checks since then, unlike those
    of the original ChainerMN. Chainer writes a snapshot before it asks the trigger. So a resumed
    run skips the check in the iteration of its snapshot.

    Examples
    --------
    >>> stop = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
    ...     comm, monitor="main/loss", patience=3, max_trigger=(2, "epoch")
    ... )
    >>> trainer = training.Trainer(updater, stop_trigger=stop)
    >>> trainer.run()
    >>> updater.epoch
    2
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        *,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        suffix: str = "_aggregated",
        **kwargs: Any,
    ) -> None:
        self.comm = comm
        self.aggregator = ObservationAggregator(comm, monitor, monitor + suffix)
        self.actual_trigger = EarlyStoppingTrigger(
            check_trigger=check_trigger,
            monitor=monitor + suffix,
            patience=patience,
            mode=mode,
            verbose=verbose and comm.rank == 0,
            max_trigger=max_trigger,
            **kwargs,
        )
        self._resumed = False

    def __call__(self, trainer: chainer.training.Trainer) -> bool:
        """Tell whether to stop; the answer is the same on every rank. Collective."""
        self.aggregator(trainer)
        return run_on_root(self.comm, 0, type(self).__name__, lambda: self._decide(trainer))

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Load or save the best value and the number of checks since then.

        Loading a snapshot without them changes nothing.
        """
        actual = self.actual_trigger
        try:
            actual.best = float(serializer("best", actual.best))
        except KeyError:
            return
        actual.count = int(serializer("count", actual.count))
        actual._summary.serialize(serializer["summary"])
        for name in ("_interval_trigger", "_max_trigger"):
            trigger = getattr(actual, name)
            if hasattr(trigger, "serialize"):
                trigger.serialize(serializer[name.strip("_")])
        self._resumed = isinstance(serializer, chainer.Deserializer)

    def _decide(self, trainer: chainer.training.Trainer) -> bool:
        if not self._resumed:
            return bool(self.actual_trigger(trainer))
        self._resumed = False
        # Nothing has been observed yet, but the triggers must know that this iteration is over.
        self.actual_trigger._interval_trigger(trainer)
        return bool(self.actual_trigger._max_trigger(trainer))

    def get_training_length(self) -> tuple[int, str]:
        """Return ``max_trigger``, for progress bars."""
        return self.actual_trigger.get_training_length()
