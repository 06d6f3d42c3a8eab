"""Has cuDNN compute on CuPy's arrays: the only part that needs a device."""

from __future__ import annotations

import functools
import importlib
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any

from chainer_compat.cudnn import graphs

# Of one thread on one device. A network for images of one size needs some dozens.
PLANS_KEPT = 1024
# cuDNN takes it for granted that arrays begin at a multiple of these bytes.
ALIGNMENT = 16


class Gpu:
    """What is asked of CuPy. The tests replace it."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")

    def holds(self, array: Any) -> bool:
        """Return whether an array is CuPy's."""
        return isinstance(array, self._cupy.ndarray)

    def device(self) -> int:
        """Return the number of the current device."""
        return int(self._cupy.cuda.runtime.getDevice())

    def capability(self) -> int:
        """Return the compute capability of the current device, such as 90 for 9.0."""
        return int(self._cupy.cuda.Device().compute_capability)

    def stream(self) -> int:
        """Return the address of the current stream."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def synchronize(self) -> None:
        """Wait for all that the current device has to do."""
        self._cupy.cuda.Device().synchronize()

    def empty(self, shape: graphs.Shape, dtype: str) -> Any:
        """Return an array whose values are arbitrary."""
        return self._cupy.empty(shape, dtype)

    def copy(self, array: Any) -> Any:
        """Return a dense copy of an array."""
        return self._cupy.array(array, order="C")

    def pointer(self, array: Any) -> int:
        """Return the address of the first element of an array."""
        return int(array.data.ptr)


class Runner:
    """Keeps a handle, and plans, for every thread and device: cuDNN's may not be shared.

    Parameters
    ----------
    cudnn
        The module of nvidia-cudnn-frontend.
    gpu
        Where arrays are.
    """

    def __init__(self, cudnn: ModuleType, gpu: Gpu) -> None:
        self.cudnn = cudnn
        self.gpu = gpu
        self._local = threading.local()

    def run(self, problem: graphs.Problem, **inputs: Any) -> dict[str, Any]:
        """Compute on the current stream of the current device.

        Parameters
        ----------
        problem
            What is to be computed.
        **inputs
            The arrays that it needs, by name.

        Returns
        -------
        dict
            The new arrays, by name.
        """
        mine = self._mine()
        plan = mine.plan(problem)
        outputs = {
            name: self.gpu.empty(shape, dtype) for name, (shape, dtype) in problem.outputs.items()
        }
        # What is allocated here and freed on return is reused only by later work of this stream.
        arrays = {name: self.readable(array) for name, array in inputs.items()} | outputs
        workspace = self.gpu.empty((plan.workspace,), "uint8")
        pointers = {plan.tensors[name]: self.gpu.pointer(arrays[name]) for name in arrays}
        plan.graph.execute(pointers, self.gpu.pointer(workspace), handle=self.handle())
        return outputs

    def handle(self) -> Any:
        """Return this thread's handle for the current device, set to the current stream."""
        handle = self._mine().handle
        self.cudnn.set_stream(handle, self.gpu.stream())
        return handle

    def readable(self, array: Any) -> Any:
        """Return an array, or a copy of it if cuDNN would not read it right."""
        if array.flags.c_contiguous and self.gpu.pointer(array) % ALIGNMENT == 0:
            return array
        return self.gpu.copy(array)

    def _mine(self) -> _Plans:
        """Return what this thread keeps for the current device."""
        devices = vars(self._local).setdefault("devices", {})
        device = self.gpu.device()
        if device not in devices:
            devices[device] = _Plans(self.cudnn, self.gpu)
        return devices[device]


class _Plans:
    """A handle, and the plans that were used last."""

    def __init__(self, cudnn: ModuleType, gpu: Gpu) -> None:
        self.handle = cudnn.create_handle()
        self._cudnn = cudnn
        self._gpu = gpu
        self._plans: OrderedDict[graphs.Problem, graphs.Plan] = OrderedDict()

    def plan(self, problem: graphs.Problem) -> graphs.Plan:
        plan = self._plans.pop(problem, None)
        if plan is None:
            if len(self._plans) >= PLANS_KEPT:
                # Its kernels are unloaded, and may still be running.
                self._gpu.synchronize()
                self._plans.popitem(last=False)
            plan = graphs.plan(self._cudnn, problem, handle=self.handle)
        self._plans[problem] = plan
        return plan


@functools.cache
def the_runner() -> Runner:
    """Return the runner of this process. The first call loads cuDNN."""
    return Runner(importlib.import_module("cudnn"), Gpu())
