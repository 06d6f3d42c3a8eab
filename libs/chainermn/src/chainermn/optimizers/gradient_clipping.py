"""Clip gradients by the norm of all of them, also of scaled ones and in 16 bits."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn.arguments import check_communicator
from chainermn.communicators.communicator_base import CommunicatorBase


class GradientClipping:
    """Optimizer hook: scales the gradients down if their norm is larger than a threshold.

    As ``chainer.optimizer_hooks.GradientClipping``, which however takes the norm of gradients as
    they are scaled by ``loss_scaling``, and adds up float16 in float16. With a multi-node
    optimizer it is the norm of the mean gradients, the same on all ranks.

    Parameters
    ----------
    threshold : float
        The largest norm.
    comm : CommunicatorBase, optional
        Of ranks whose models are parts of one: the norm is that of all parts together. Each
        update is then collective.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        If the threshold is not a positive number.

    References
    ----------
    Pascanu, Mikolov and Bengio: On the difficulty of training recurrent neural networks, 2013.
    """

    name = "GradientClipping"
    call_for_each_param = False
    timing = "pre"

    def __init__(self, threshold: float, comm: CommunicatorBase | None = None) -> None:
        if not threshold > 0:
            raise ValueError(f"GradientClipping: the threshold must be positive, got {threshold}")
        if comm is not None:
            check_communicator("GradientClipping(threshold, comm)", comm, threshold)
        self.threshold, self.comm = threshold, comm

    def __call__(self, optimizer: chainer.Optimizer) -> None:
        """Scale the gradients."""
        parameters = [p for p in optimizer.target.params() if p.grad is not None]
        squares: Any = sum(gradient.dot(gradient) for gradient in map(_flat, parameters))
        if self.comm is not None:
            squares = self.comm.allreduce(np.array(float(squares)))
        # Without ``comm`` the host neither knows the norm of a GPU's gradients nor waits for it.
        xp = chainer.backend.get_array_module(squares)
        norm = xp.sqrt(xp.asarray(squares, np.float64))
        factor = self.threshold / xp.maximum(norm, self.threshold)
        # A step whose gradients overflow is skipped afterwards.
        # [()], since CuPy multiplies by NumPy's scalars, but not by its arrays without axes.
        factor = xp.where(xp.isfinite(norm), factor, 1.0)[()]
        if xp is np and factor == 1:
            return
        for parameter in parameters:
            parameter.grad *= factor.astype(parameter.grad.dtype)


def _flat(parameter: Any) -> Any:
    """Return a gradient without its scale, of shape (n,); a copy only if it has to be."""
    gradient = parameter.grad.ravel()
    gradient = gradient.astype(np.promote_types(gradient.dtype, np.float32), copy=False)
    scale = parameter._loss_scale or 1
    return gradient if scale == 1 else gradient / scale
