"""What updates accumulate for a later exchange."""

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


class Accumulated(Protocol):
    """What has been accumulated, as snapshots hold it.

    Attributes
    ----------
    keys : tuple of str
        Names of the arrays that there may be of each parameter.
    """

    keys: ClassVar[tuple[str, ...]]

    def state(self, optimizer: chainer.Optimizer) -> Arrays:
        """Return it, for a snapshot."""

    def load(self, arrays: Arrays | None) -> None:
        """Remember what a snapshot holds, until `take_over`; with None, nothing.

        ``arrays`` may hold others, too.
        """

    def take_over(self, optimizer: chainer.Optimizer) -> None:
        """Go on from what has been loaded, if anything has been.

        A snapshot loads an optimizer before its model, so this has to wait for an update.
        """


class AccumulatedGradients:
    """The gradients of an optimizer's target; see `Accumulated`."""

    keys: ClassVar[tuple[str, ...]] = (_GRADIENT, _SCALE)

    def __init__(self) -> None:
        self._loaded: Arrays | None = None

    def state(self, optimizer: chainer.Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the gradients and their loss scales."""
        self.take_over(optimizer)
        return {
            name: {_GRADIENT: p.grad, _SCALE: np.array(p._loss_scale or 1.0)}
            for name, p in named_parameters(optimizer.target)
            if p.grad is not None
        }

    def load(self, arrays: Arrays | None) -> None:
        """Remember what a snapshot holds: see `Accumulated.load`."""
        self._loaded = arrays

    def take_over(self, optimizer: chainer.Optimizer) -> None:
        """Replace the gradients by those that have been loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
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


class Anchors:
    """The parameters when they were last averaged: steps accumulate from there on.

    See `Accumulated`.

    Attributes
    ----------
    arrays : dict of str to array
        By name of the parameter; empty until a step is taken after the replicas became equal.
    """

    keys: ClassVar[tuple[str, ...]] = (_ANCHOR,)

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._loaded: Arrays | None = None

    def state(self, optimizer: chainer.Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the arrays."""
        self.take_over(optimizer)
        return {name: {_ANCHOR: array} for name, array in self.arrays.items()}

    def load(self, arrays: Arrays | None) -> None:
        """Remember what a snapshot holds: see `Accumulated.load`."""
        self.arrays, self._loaded = {}, arrays

    def take_over(self, optimizer: chainer.Optimizer) -> None:
        """Copy what has been loaded to the devices of the parameters."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        for name, parameter in named_parameters(optimizer.target):
            if _ANCHOR in loaded.get(name, {}):
                array = np.array(loaded[name][_ANCHOR])
                self.arrays[name] = parameter.device.send(array)
