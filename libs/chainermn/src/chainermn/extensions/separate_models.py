"""Notice that the ranks evaluate models that have been trained apart from each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import chainer

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.links import MultiNodeChainList
from chainermn.optimizers.exchanges import library_exchange
from chainermn.optimizers.parts import describe, parameters_of
from chainermn.optimizers.settling import optimizers_of


class SeparateModels:
    """Warns, at most once, if nothing has been averaged and the models of ranks differ.

    Models with other names or shapes on some ranks differ on purpose: model parallelism. Nothing
    is known about communicators whose own method averages.

    Parameters
    ----------
    communicator : CommunicatorBase
        Communicator of an evaluator.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self._communicator = communicator
        self._exchange = library_exchange(communicator)
        self._is_settled = self._exchange is None or communicator.size == 1

    def warn(self, where: str, targets: Iterable[Any], updater: Any) -> None:
        """Compare the models of an evaluation, and warn on rank 0 if they differ. Collective.

        Parameters
        ----------
        where : str
            Function to name in the warning.
        targets : iterable
            What is evaluated; only links are compared.
        updater : updater or None
            Updater of the trainer, if there is one. Before its first iteration, models may not
            be equal yet.
        """
        if self._is_settled:
            return
        models = [target for target in targets if isinstance(target, chainer.Link)]
        is_parallel = any(
            isinstance(link, MultiNodeChainList) for m in models for link in m.links()
        )
        is_averaged = self._exchange is not None and self._exchange.has_averaged
        is_settled = is_averaged or is_parallel or bool(optimizers_of(updater)) or not models
        is_before_training = updater is not None and updater.iteration == 0
        own = None
        if not (is_settled or is_before_training):
            own = [describe(parameters_of(model)) for model in models]
        flags, found = zip(*self._communicator.allgather_obj((is_settled, own)), strict=True)
        self._is_settled = any(flags)
        if self._is_settled or None in found:
            return
        layouts = [
            [(name, each[:2]) for model in one for name, each in model.items()] for one in found
        ]
        if all(one == layouts[0] for one in layouts) and any(one != found[0] for one in found):
            self._is_settled = True
            if self._communicator.rank == 0:
                warnings.warn(
                    f"{where}: the result is a mean over different models, because nothing has "
                    "been averaged on this communicator. Train with "
                    "chainermn.create_multi_node_optimizer(optimizer, comm). If the models differ "
                    "on purpose, as in an ensemble, ignore this warning",
                    stacklevel=4,
                )
