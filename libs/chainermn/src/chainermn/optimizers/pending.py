"""What updates leave behind for a later one that sends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import chainer
import numpy as np

from chainermn.gradients.parameters import named_parameters
from chainermn.optimizers.unsent import Arrays

# Keys in snapshots.
_GRADIENT, _SCALE = "gradient", "gradient_loss_scale"
_ANCHOR = "anchor"


class Pending(Protocol):
    """What is left behind, as snapshots hold it.

    Attributes
    ----------
    keys : tuple of str
        Names of the arrays that there may be of each parameter.
    """

    keys: ClassVar[tuple[str, ...]]

    def state(self) -> Arrays:
        """Return it, by parameter."""

    def load(self, arrays: Arrays | None) -> None:
        """Go on from what a snapshot holds, or None if it holds nothing."""

    def take_over(self) -> None:
        """Take over what has been loaded, now that the model has been loaded too."""


class PendingGradients:
    """The gradients of an optimizer's target, which later updates add to; a `Pending`."""

    keys: ClassVar[tuple[str, ...]] = (_GRADIENT, _SCALE)

    def __init__(self, actual_optimizer: chainer.Optimizer) -> None:
        self._optimizer = actual_optimizer
        self._loaded: Arrays | None = None

    def state(self) -> dict[str, Mapping[str, Any]]:
        """Return the gradients, and their loss scales."""
        self.take_over()
        return {
            name: {_GRADIENT: p.grad, _SCALE: np.array(p._loss_scale or 1.0)}
            for name, p in named_parameters(self._optimizer.target)
            if p.grad is not None
        }

    def load(self, arrays: Arrays | None) -> None:
        """Go on from what a snapshot holds, or None if it holds nothing."""
        self._loaded = arrays

    def take_over(self) -> None:
        """Replace the gradients by those that have been loaded, if any have been."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        scale = self._optimizer._loss_scale
        for name, parameter in named_parameters(self._optimizer.target):
            arrays = loaded.get(name, {})
            parameter.cleargrad()
            if _GRADIENT in arrays:
                factor = (scale or 1.0) / float(arrays[_SCALE])
                gradient = np.array(arrays[_GRADIENT])
                parameter.grad = parameter.device.send(
                    gradient if factor == 1 else gradient * factor
                )
                parameter._loss_scale = scale


class Anchors:
    """The parameters when they were last averaged; a `Pending`.

    Attributes
    ----------
    arrays : dict of str to array
        By name of the parameter; empty until a step is taken after the replicas became equal.
    """

    keys: ClassVar[tuple[str, ...]] = (_ANCHOR,)

    def __init__(self, actual_optimizer: chainer.Optimizer) -> None:
        self.arrays: dict[str, Any] = {}
        self._optimizer = actual_optimizer
        self._loaded: Arrays | None = None

    def state(self) -> dict[str, Mapping[str, Any]]:
        """Return the arrays, by parameter."""
        self.take_over()
        return {name: {_ANCHOR: array} for name, array in self.arrays.items()}

    def load(self, arrays: Arrays | None) -> None:
        """Go on from what a snapshot holds, or None if it holds nothing."""
        self.arrays, self._loaded = {}, arrays

    def take_over(self) -> None:
        """Copy what has been loaded, if anything has been, to the devices of the parameters."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        for name, parameter in named_parameters(self._optimizer.target):
            if _ANCHOR in loaded.get(name, {}):
                array = np.array(loaded[name][_ANCHOR])
                self.arrays[name] = parameter.device.send(array)
