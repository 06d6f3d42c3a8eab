"""Clip gradients by their norm, also with loss scaling and in 16 bits."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn.arguments import check_communicator
from chainermn.channels_last import as_stored, is_channels_last
from chainermn.communicators.communicator_base import CommunicatorBase


class GradientClipping:
    """Optimizer hook that scales gradients down if their norm is larger than a threshold.

    It works like ``chainer.optimizer_hooks.GradientClipping``, but also with mixed precision: it
    takes the norm of gradients without their loss scale, and adds up float16 values in float32.
    With a multi-node optimizer, the norm is that of the mean gradients, the same on all ranks.

    Parameters
    ----------
    threshold : float
        Largest norm allowed.
    comm : CommunicatorBase, optional
        Communicator of the ranks that hold the parts of one model, for model parallelism. The
        norm is then that of all parts together, and every rank must call ``update``.

    Raises
    ------
    TypeError
        If ``comm`` is not a communicator.
    ValueError
        If the threshold is not a positive number.

    Examples
    --------
    >>> optimizer.add_hook(chainermn.optimizers.GradientClipping(threshold=1.0))

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
        """Scale the gradients down, if necessary."""
        parameters = [p for p in optimizer.target.params() if p.grad is not None]
        squares: Any = sum(gradient.dot(gradient) for gradient in map(_flat, parameters))
        if self.comm is not None:
            squares = self.comm.allreduce(np.array(float(squares)))
        # Without ``comm``, the host neither needs the norm of a GPU's gradients nor waits for it.
        xp = chainer.backend.get_array_module(squares)
        norm = xp.sqrt(xp.asarray(squares, np.float64))
        factor = self.threshold / xp.maximum(norm, self.threshold)
        # A step whose gradients overflow is skipped afterwards.
        # [()], because CuPy multiplies by NumPy's scalars, but not by its arrays without axes.
        factor = xp.where(xp.isfinite(norm), factor, 1.0)[()]
        if xp is np and factor == 1:
            return
        for parameter in parameters:
            parameter.grad *= factor.astype(parameter.grad.dtype)


def _flat(parameter: Any) -> Any:
    """Return a gradient without its loss scale, of shape (n,); a copy only if necessary."""
    gradient = as_stored(parameter.grad, is_channels_last(parameter.grad)).ravel()
    gradient = gradient.astype(np.promote_types(gradient.dtype, np.float32), copy=False)
    scale = parameter._loss_scale
    if hasattr(scale, "astype"):  # in a step that a CUDA graph records, it is in GPU memory
        scale = scale.astype(gradient.dtype)
    return gradient if scale is None else gradient / scale
