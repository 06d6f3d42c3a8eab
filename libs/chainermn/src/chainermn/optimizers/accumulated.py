"""Gradients or parameter changes that updates accumulate for a later exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import chainer
import numpy as np
from typing_extensions import override

from chainermn.gradients.parameters import named_parameters
from chainermn.optimizers.pending import Arrays

# Keys in snapshots.
_GRADIENT, _SCALE = "gradient", "gradient_loss_scale"
_ANCHOR = "anchor"


class Accumulated(ABC):
    """Accumulated arrays, which snapshots hold.

    Attributes
    ----------
    keys : tuple of str
        Names of the arrays that each parameter may have.
    """

    keys: ClassVar[tuple[str, ...]]
    _loaded: Arrays | None = None

    def load(self, arrays: Arrays | None) -> None:
        """Keep the arrays of a snapshot until `take_over`; None drops them.

        ``arrays`` may also hold arrays with other keys.
        """
        self._loaded = arrays

    def take_over(self, optimizer: chainer.Optimizer) -> None:
        """Continue from the loaded arrays, if there are any.

        An update calls this, because snapshots load the optimizer before its model.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._restore(loaded, optimizer)

    @abstractmethod
    def state(self, optimizer: chainer.Optimizer) -> Arrays:
        """Return the arrays for a snapshot."""

    @abstractmethod
    def _restore(self, loaded: Arrays, optimizer: chainer.Optimizer) -> None:
        """Replace the current arrays by those of a snapshot."""


class AccumulatedGradients(Accumulated):
    """The gradients of an optimizer's model, and their loss scales."""

    keys: ClassVar[tuple[str, ...]] = (_GRADIENT, _SCALE)

    @override
    def state(self, optimizer: chainer.Optimizer) -> Arrays:
        self.take_over(optimizer)
        return {
            name: {_GRADIENT: p.grad, _SCALE: np.array(p._loss_scale or 1.0)}
            for name, p in named_parameters(optimizer.target)
            if p.grad is not None
        }

    @override
    def _restore(self, loaded: Arrays, optimizer: chainer.Optimizer) -> None:
        scale = optimizer._loss_scale
        for name, parameter in named_parameters(optimizer.target):
            arrays = loaded.get(name, {})
            parameter.cleargrad()
            if _GRADIENT in arrays:
                factor = (scale or 1.0) / float(arrays[_SCALE])
                gradient = np.array(arrays[_GRADIENT])
                parameter.grad = parameter.device.send(
                    gradient if factor == 1 else gradient * factor
                )
                parameter._loss_scale = scale


class Anchors(Accumulated):
    """The parameters as they were when they were last averaged.

    Attributes
    ----------
    arrays : dict of str to array
        Arrays by the names of parameters; empty until the first step on equal replicas.
    """

    keys: ClassVar[tuple[str, ...]] = (_ANCHOR,)

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    @override
    def load(self, arrays: Arrays | None) -> None:
        super().load(arrays)
        self.arrays = {}

    @override
    def state(self, optimizer: chainer.Optimizer) -> Arrays:
        self.take_over(optimizer)
        return {name: {_ANCHOR: array} for name, array in self.arrays.items()}

    @override
    def _restore(self, loaded: Arrays, optimizer: chainer.Optimizer) -> None:
        for name, parameter in named_parameters(optimizer.target):
            if _ANCHOR in loaded.get(name, {}):
                array = np.array(loaded[name][_ANCHOR])
                self.arrays[name] = parameter.device.send(array)
