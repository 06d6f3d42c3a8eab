"""The loss scale in GPU memory, where recorded steps find gradients that are not finite."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import numpy as np


class Scaling:
    """The loss scale of an optimizer, with what Chainer keeps to change it.

    While graphs are launched, the GPU changes it. `settle` gives it back to the optimizer.

    Attributes
    ----------
    scale : array of float64
        Loss scale.
    found : array of bool
        Whether a gradient of the current step is not finite, so that the step is skipped.
    last : array of bool
        Whether the last step was skipped.
    ever : array of bool
        Whether any step ever was.
    n_skipped : array of int64
        Number of steps skipped since `settle`.
    """

    def __init__(self, chainer: ModuleType) -> None:
        self._cuda = chainer.backends.cuda
        xp = self._xp = self._cuda.cupy
        self.scale = xp.ones((), np.float64)
        self.found, self.ever = xp.zeros((), bool), xp.zeros((), bool)
        self.last = xp.zeros((), bool)
        self.n_skipped = xp.zeros((), np.int64)
        self._given: tuple[Any, ...] = ()

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays."""
        names = "scale", "found", "last", "ever", "n_skipped"
        return {name: getattr(self, name) for name in names}

    def take(self, optimizer: Any) -> None:
        """Take the loss scale from the optimizer, unless the GPU has that one or a later one."""
        own = vars(optimizer)
        given = own.get("_loss_scale"), own.get("_loss_scaling_isnan_ever", False)
        if given != self._given:
            self.scale[...] = 1.0 if given[0] is None else given[0]
            self.ever[...] = given[1]
            self._given = given

    def change(self, optimizer: Any) -> None:
        """Enqueue what Chainer does with the loss scale after a step."""
        rescale = self._cuda.elementwise(
            "float64 grow, float64 largest",
            "float64 scale, bool found, bool last, bool ever, int64 n_skipped",
            """
            last = found;
            ever = ever || found;
            n_skipped += found;
            scale = max(1.0, min(largest, scale * (found ? 0.5 : ever ? grow : 2.0)));
            found = false
            """,
            "rescale",
        )
        grow, largest = optimizer._loss_scaling_multiplier, optimizer._loss_scale_max
        rescale(grow, largest, *self.arrays.values())

    def settle(self, optimizer: Any) -> int:
        """Give the loss scale back to the optimizer; return how many steps were skipped.

        Waits for the GPU.
        """
        n_skipped = int(self.n_skipped)
        scale, ever = float(self.scale), bool(self.ever)
        vars(optimizer).update(
            _loss_scale=scale,
            _loss_scaling_isnan=bool(self.last),
            _loss_scaling_isnan_ever=ever,
        )
        self._given = scale, ever
        if n_skipped:
            self.n_skipped[...] = 0
            warnings.warn(
                f"{n_skipped} step{'s were' if n_skipped > 1 else ' was'} skipped, because a "
                f"gradient was not finite, the last one at or before iteration {optimizer.t}. The "
                f"loss scale is now {scale:g}",
                stacklevel=2,
            )
        return n_skipped
