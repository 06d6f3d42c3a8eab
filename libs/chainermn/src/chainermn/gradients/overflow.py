"""Gradients that overflow in float16, whose largest number is 65504."""

from __future__ import annotations

from typing import TYPE_CHECKING

import chainer
import numpy as np

from chainermn.agreement import any_true
from chainermn.gradients.parameters import named_parameters

if TYPE_CHECKING:
    from mpi4py import MPI


def check_overflow(mpi_comm: MPI.Intracomm, model: chainer.Link, largest: float) -> None:
    """Check that no finite gradient has become infinite. Collective.

    Parameters
    ----------
    mpi_comm : mpi4py.MPI.Intracomm
    model : chainer.Link
        Model whose gradients are already the means.
    largest : float
        Largest magnitude that became infinite on this rank, or 0.

    Raises
    ------
    OverflowError
        On all ranks, if a gradient has become infinite on any, unless loss scaling is on: then
        Chainer skips the step, and lowers a dynamic scale.
    """
    if not any_true(mpi_comm, largest > 0):
        return
    pairs = named_parameters(model)
    is_scaled = any(parameter._loss_scale is not None for _, parameter in pairs)
    everywhere = mpi_comm.allgather((largest, is_scaled))
    if any(scaled for _, scaled in everywhere):
        return
    names = [
        name
        for name, parameter in pairs
        if parameter.array is not None
        and parameter.grad is not None
        and not np.isfinite(parameter.grad).all()
    ]
    shown = ", ".join(
        f"{value:.3g} on rank {rank}" for rank, (value, _) in enumerate(everywhere) if value
    )
    raise OverflowError(
        f"multi_node_mean_grad: gradients beyond 65504, the largest float16, have become infinite "
        f"on the wire: {', '.join(names)} (up to {shown}). Use allreduce_grad_dtype='bfloat16', "
        "which has the range of float32, or 'float32'; or scale the loss: "
        "optimizer.loss_scaling() skips such steps"
    )
