"""Keep filters channels last, if ``compute_mode`` asks for it, and load snapshots into them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.channels_last import layout
from chainer_fast.repairs.compute_mode import insist_on_cudnn


def lay_out_filters(module: ModuleType) -> None:
    """Let ``convolution_2d`` or ``deconvolution_2d`` lay its filters out when it first gets them.

    Links and scripts call this function, so it sees every filter, and initialized. What optimizers
    keep for a parameter follows its order.
    """
    name = module.__name__.rpartition(".")[2]
    original, chainer, cuda = getattr(module, name), module.chainer, module.cuda

    @surgery.replaces(module, name)
    def convolve(x: Any, W: Any, *args: Any, **kwargs: Any) -> Any:
        array = getattr(W, "array", W)
        if isinstance(array, cuda.ndarray) and layout.is_wanted(array.dtype):
            insist_on_cudnn()
            # Other variables exist for one step only.
            if isinstance(W, chainer.Parameter) and not layout.as_stored(array).flags.c_contiguous:
                with chainer.using_device(W.device):
                    W.array = layout.converted(cuda.cupy, array)
        return original(x, W, *args, **kwargs)


def set_channels_last(module: ModuleType) -> None:
    """Let ``ndarray.set``, which snapshots are loaded with, write to channels-last arrays."""
    array = module.cupy.ndarray
    original = array.set

    @surgery.replaces(array, "set")
    def set_(self: Any, arr: Any, stream: Any = None) -> None:
        if layout.is_channels_last(self) and getattr(arr, "shape", None) == self.shape:
            self, arr = layout.as_stored(self), layout.as_stored(arr)
        original(self, arr, stream)
