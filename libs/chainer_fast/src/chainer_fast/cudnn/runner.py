"""Let cuDNN compute on CuPy's arrays. Only this part needs a device."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from chainer_fast.channels_last import layout
from chainer_fast.cudnn import graphs
from chainer_fast.gpu import Gpu

# Plans per thread and device. A network for images of one size needs some dozens.
PLANS_KEPT = 1024
# The libraries used here, libcudnn_cnn and libcudnn_ops of cuDNN 9.28, only have code for Turing
# and newer GPUs, although cuDNN also makes plans for Volta.
CAPABILITY = 75
# cuDNN assumes that arrays begin at a multiple of these bytes.
ALIGNMENT = 16


class Runner:
    """Keeps a handle and plans for each thread and device, which must not share them.

    Parameters
    ----------
    cudnn
        Module of nvidia-cudnn-frontend.
    gpu
        GPU that holds the arrays.
    """

    def __init__(self, cudnn: ModuleType, gpu: Gpu) -> None:
        self.cudnn = cudnn
        self.gpu = gpu
        self._local = _Local()

    def run(self, problem: graphs.Convolution, first: Any, second: Any) -> Any:
        """Compute on the current stream of the current device.

        Parameters
        ----------
        problem
            Computation to perform.
        first, second
            Input arrays, in the order of ``graphs.OPERATIONS``.

        Returns
        -------
        array
            The result, or None if cuDNN does not support these shapes, this dtype or the device.
        """
        mine, gpu = self._mine(), self.gpu
        plan = mine.plan(problem)
        if plan is None:
            return None
        # Memory freed on return is only reused by later work on this stream.
        first, second = (
            self.readable(array, channels_last=problem.channels_last) for array in (first, second)
        )
        shape = getattr(problem, problem.computes)
        if problem.channels_last:
            result = layout.empty(gpu, shape, problem.dtype)
        else:
            result = gpu.empty(shape, problem.dtype)
        workspace = gpu.allocate(plan.workspace)
        addresses = gpu.pointer(first), gpu.pointer(second), gpu.pointer(result)
        plan.launch(dict(zip(plan.uids, addresses, strict=True)), workspace.ptr)
        return result

    def handle(self) -> Any:
        """Return this thread's handle for the current device, set to the current stream."""
        return self._mine().handle

    def readable(self, array: Any, *, channels_last: bool = False) -> Any:
        """Return an array, or a copy if cuDNN could not read it correctly in this order."""
        view = layout.as_stored(array) if channels_last else array
        if view.flags.c_contiguous and self.gpu.pointer(array) % ALIGNMENT == 0:
            return array
        copy = self.gpu.copy(view)
        return layout.as_shaped(copy) if channels_last else copy

    def _mine(self) -> _Plans:
        """Return this thread's plans for the current device, set to the current stream."""
        device = self.gpu.device()
        mine = self._local.devices.get(device)
        if mine is None:
            mine = self._local.devices[device] = _Plans(self.cudnn, self.gpu)
        self.cudnn.set_stream(mine.handle, self.gpu.stream())
        return mine


class _Local(threading.local):
    def __init__(self) -> None:
        self.devices: dict[int, _Plans] = {}


class _Plans:
    """A handle and the plans that were used last."""

    def __init__(self, cudnn: ModuleType, gpu: Gpu) -> None:
        self.handle = cudnn.create_handle()
        plan = functools.partial(_plan, cudnn, gpu, self.handle, itertools.count())
        self.plan = functools.lru_cache(PLANS_KEPT)(plan)


def _plan(
    cudnn: ModuleType,
    gpu: Gpu,
    handle: Any,
    made: Iterator[int],
    problem: graphs.Convolution,
) -> graphs.Plan | None:
    """Return a plan to keep, or None if cuDNN does not support the problem."""
    if next(made) >= PLANS_KEPT:
        # Dropping a plan unloads its kernels, which may still be running.
        gpu.synchronize()
    if gpu.capability() < CAPABILITY or not problem.is_possible:
        return None
    return graphs.plan(cudnn, problem, handle=handle)


@functools.cache
def the_runner() -> Runner:
    """Return the runner of this process. The first call loads cuDNN."""
    return Runner(importlib.import_module("cudnn"), Gpu())
