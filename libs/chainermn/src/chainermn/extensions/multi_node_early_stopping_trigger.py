"""Early stopping that all ranks agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chainer.training.triggers import EarlyStoppingTrigger

from chainermn.extensions.observation_aggregator import ObservationAggregator

if TYPE_CHECKING:
    import chainer

    from chainermn.communicators.communicator_base import CommunicatorBase


class MultiNodeEarlyStoppingTrigger:
    """Stops training on all ranks once the mean over the ranks no longer improves.

    To be used as the ``stop_trigger`` of the trainers of all ranks. Rank 0 decides, so that
    ranks whose epochs end in different iterations stop together as well.

    Parameters
    ----------
    comm : CommunicatorBase
    check_trigger : (int, 'epoch' or 'iteration')
        How often the mean of what was observed since the last check is compared with the best.
    monitor : str
        The observed value, such as ``'main/loss'`` or ``'validation/main/loss'``.
    patience : int, optional
        Stop after this many checks in a row without an improvement; 3 by default. ``patients``
        is another name for it.
    mode : {'auto', 'min', 'max'}
        Whether the value should fall or rise; ``'auto'``: rise if its name has ``'accuracy'``.
    verbose : bool
        Print on rank 0.
    max_trigger : (int, 'epoch' or 'iteration')
        Stop then at the latest.
    suffix : str
        The mean over the ranks is reported as ``monitor + suffix``.
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

    def __call__(self, trainer: chainer.training.Trainer) -> bool:
        """Tell whether to stop; the same on every rank. Collective."""
        self.aggregator(trainer)
        is_time = bool(self.actual_trigger(trainer)) if self.comm.rank == 0 else None
        return bool(self.comm.bcast_obj(is_time))

    def get_training_length(self) -> tuple[int, str]:
        """Return ``max_trigger``, for progress bars."""
        return self.actual_trigger.get_training_length()
