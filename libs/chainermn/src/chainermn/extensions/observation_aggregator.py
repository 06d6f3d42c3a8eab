"""Combine the reported values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.training.extension import PRIORITY_EDITOR, Extension

from chainermn.agreement import run_on_root
from chainermn.communicators.communicator_base import CommunicatorBase


class ObservationAggregator(Extension):
    """Extension that combines the observed values of all ranks into one value for all ranks.

    Parameters
    ----------
    comm : CommunicatorBase
        Communicator of the ranks.
    original_key : str
        Name of the value that each rank observes, such as ``'main/loss'``. Iterations in which a
        rank does not observe it are ignored.
    aggregated_key : str, optional
        Name under which the result is reported; ``original_key`` by default.
    comm_trigger : trigger
        Trigger that combines the observations since the last time. It must fire in the same
        iterations on all ranks.
    aggregator : callable, optional
        Function that rank 0 calls with one list per rank, and that returns the result. A list
        holds the observations of a rank, oldest first, in host memory; variables come without
        their graph. By default, it is the mean of all observations, element by element: a variable
        with the same dtype if they are variables, such as the loss of a ``Classifier``; otherwise
        a float or an array of float64.

    Examples
    --------
    >>> trainer.extend(chainermn.extensions.ObservationAggregator(comm, "main/loss"))
    >>> trainer.run()
    >>> losses = comm.allgather_obj(trainer.observation["main/loss"].item())
    >>> losses[0] == losses[1]
    True
    """

    trigger = 1, "iteration"
    priority = PRIORITY_EDITOR
    name: str | None = None

    def __init__(
        self,
        comm: CommunicatorBase,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Any = (1, "iteration"),
        aggregator: Callable[[list[list[Any]]], Any] | None = None,
    ) -> None:
        self.comm = comm
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = chainer.training.get_trigger(comm_trigger)
        self.aggregator = aggregator or _mean
        self._history: list[Any] = []

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Keep the current value. If ``comm_trigger`` fires, combine all values; then collective.

        If the aggregator raises, every rank raises.
        """
        if self.original_key in trainer.observation:
            self._history.append(_in_host_memory(trainer.observation[self.original_key]))
        if not self.comm_trigger(trainer):
            return
        gathered: Any = self.comm.gather_obj(self._history)
        self._history = []

        def aggregate() -> tuple[bool, Any]:
            if not any(gathered):
                return False, None
            with chainer.no_backprop_mode():
                return True, self.aggregator(gathered)

        is_observed, value = run_on_root(self.comm, 0, "ObservationAggregator", aggregate)
        if is_observed:
            trainer.observation[self.aggregated_key] = value


def _in_host_memory(value: Any) -> Any:
    if isinstance(value, chainer.Variable):
        # The variable itself would keep the whole computational graph alive.
        return chainer.Variable(cuda.to_cpu(value.array), requires_grad=False)
    return cuda.to_cpu(value) if isinstance(value, chainer.get_array_types()) else value


def _mean(observed: list[list[Any]]) -> Any:
    values = [value for history in observed for value in history]
    arrays = [value.array if isinstance(value, chainer.Variable) else value for value in values]
    mean = np.mean(np.asarray(arrays, np.float64), axis=0)
    if isinstance(values[0], chainer.Variable):
        dtype = np.result_type(values[0].dtype, np.float16)  # floats stay as they are
        return chainer.Variable(np.asarray(mean, dtype), requires_grad=False)
    return mean if mean.ndim else float(mean)
