"""Bring cuDNN back, if asked for: decide which of Chainer's calls use it.

All other calls use Chainer's own code on the GPU, as without cuDNN. Shapes, dtypes and settings
decide this before a call. If cuDNN itself fails, the call raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from chainer_fast.channels_last import layout
from chainer_fast.channels_last.current_step import current_step
from chainer_fast.cudnn import graphs, padding
from chainer_fast.cudnn.fused_normalization import (
    DIVISOR_OF_CHANNELS,
    FusedNormalizer,
    Normalization,
    the_fused_normalizer,
)
from chainer_fast.cudnn.normalization import MOST_IMAGES, STATISTICS, Normalizer, the_normalizer
from chainer_fast.cudnn.runner import CAPABILITY, Runner, the_runner

Runners = Callable[[], Runner]
Forward = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
Shapes = Callable[..., tuple[graphs.Shape, graphs.Shape, graphs.Shape] | None]


def use_for_convolution(module: ModuleType) -> None:
    """Let cuDNN compute convolutions, and their gradients with respect to filters."""
    _insist_on_frontend()
    convolution, gradient = module.Convolution2DFunction, module.Convolution2DGradW
    convolution.forward_gpu = convolve(convolution.forward_gpu)
    gradient.forward_gpu = correlate(gradient.forward_gpu)


def use_for_deconvolution(module: ModuleType) -> None:
    """Let cuDNN compute deconvolutions: the gradients of convolutions with respect to images."""
    _insist_on_frontend()
    deconvolution = module.Deconvolution2DFunction
    deconvolution.forward_gpu = deconvolve(deconvolution.forward_gpu)


def use_for_batch_normalization(module: ModuleType) -> None:
    """Let cuDNN normalize batches during training, but not with given statistics."""
    _insist_on_frontend()
    own = module._impl_selector
    selector = select_normalization(module)
    module._impl_selector = selector  # type: ignore[attr-defined]
    init = module.BatchNormalization.__init__
    if own not in init.__defaults__:
        raise LookupError("BatchNormalization was expected to have _impl_selector for a default")
    init.__defaults__ = tuple(selector if value is own else value for value in init.__defaults__)


def convolve(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Convolution2DFunction that uses cuDNN if possible."""

    def shapes(self: Any, x: Any, w: Any, *geometry: graphs.Pair) -> Any:
        if self.cover_all:
            return None
        return x.shape, w.shape, graphs.convolved(x.shape, w.shape, *geometry)

    return _route(own, runners, "y", shapes)


def deconvolve(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Deconvolution2DFunction that uses cuDNN if possible."""

    def shapes(self: Any, y: Any, w: Any, *_: graphs.Pair) -> Any:
        self._calc_out_size(y.shape, w.shape)
        self._set_cover_all(y.shape, w.shape)
        x_shape = (y.shape[0], w.shape[1] * self.groups, int(self.outh), int(self.outw))
        return x_shape, w.shape, y.shape

    return _route(own, runners, "x", shapes)


def correlate(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Convolution2DGradW that uses cuDNN if possible."""

    def shapes(self: Any, x: Any, y: Any, *_: graphs.Pair) -> Any:
        if x.dtype != self.W_dtype or self.w_layout is not None:
            return None
        return x.shape, tuple(self.W_shape), y.shape

    return _route(own, runners, "w", shapes)


def _route(own: Forward, runners: Runners, computes: graphs.Name, shapes: Shapes) -> Forward:
    """Return a ``forward`` that uses cuDNN if possible.

    Parameters
    ----------
    own
        Chainer's ``forward``, for everything else.
    runners
        Function that returns the runner.
    computes
        Which of ``x``, ``w`` and ``y`` to compute.
    shapes
        Function that returns the shapes of all three, or None for calls that cannot use cuDNN. It
        gets the function, its first two inputs (a third one is the bias), stride, pad and dilate.
    """

    @functools.wraps(own)
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        result = None
        if _is_plain(inputs, self.input_layouts):
            first, second = inputs[:2]
            # These are what the caller passed, such as NumPy integers or arrays.
            geometry = (
                (int(self.sy), int(self.sx)),
                (int(self.ph), int(self.pw)),
                (int(self.dy), int(self.dx)),
            )
            if found := shapes(self, first, second, *geometry):
                problem = graphs.Convolution(
                    computes,
                    *found,
                    *geometry,
                    *_demands(first.dtype),
                    channels_last=_is_channels_last(computes, first, second),
                )
                runner = runners()
                result = padding.run(runner, problem, first, second)
        if result is None:
            return own(self, inputs)
        self.retain_inputs((0, 1))
        for bias in inputs[2:]:
            if problem.channels_last:
                runner.gpu.add_bias(result, bias)
            else:
                result += bias.reshape(1, -1, 1, 1)
        return (result,)

    return forward


def select_normalization(
    module: ModuleType,
    normalizers: Callable[[], Normalizer] = the_normalizer,
    fused_normalizers: Callable[[], FusedNormalizer] = the_fused_normalizer,
) -> Callable[..., Any]:
    """Return a function that selects cuDNN's or Chainer's implementation of BatchNormalization."""
    own = module._impl_selector

    class ByCudnn(module.GeneralBatchNormalizationImpl):  # type: ignore[name-defined]
        def forward(
            self,
            axis: Any,
            gamma: Any,
            x: Any,
            x_layout: Any,
            xp: Any,
            expander: Any,
            beta: Any,
            eps: float,
            decay: float,
            running_mean: Any,
            running_var: Any,
        ) -> tuple[Any, ...]:
            averages = None if running_mean is None else (running_mean, running_var)
            y, mean, inv_std = self.normalize(x, gamma, beta, eps, decay, averages)
            return y, x_layout, running_mean, running_var, mean, None, inv_std, None

        def backward(
            self,
            axis: Any,
            gamma: Any,
            gy: Any,
            x: Any,
            x_layout: Any,
            xp: Any,
            expander: Any,
            mean: Any,
            inv_std: Any,
            eps: float,
            var: Any,
            forward_data: Any,
        ) -> tuple[Any, ...]:
            gx, ggamma, gbeta = self.gradients(gy, x, gamma, mean, inv_std, eps)
            return gx, x_layout, ggamma, gbeta

        def normalize(self, *args: Any) -> tuple[Any, Any, Any]:
            return normalizers().normalize(*args)

        def gradients(self, *args: Any) -> tuple[Any, Any, Any]:
            return normalizers().gradients(*args)

    class OfChannelsLast(ByCudnn):
        """Normalizes channels-last images, in a recorded step perhaps with what follows."""

        def normalize(self, *args: Any) -> tuple[Any, Any, Any]:
            self._call = call = Normalization(fused_normalizers(), *args)
            step = current_step()
            y = call.launch() if step is None else step.normalize(call)
            return y, call.mean, call.inv_std

        def gradients(self, gy: Any, *_: Any) -> tuple[Any, Any, Any]:
            return self._call.gradients(gy)

    def select(function: Any, inputs: tuple[Any, ...]) -> Any:
        chosen = own(function, inputs)
        if type(chosen) is not module.GeneralBatchNormalizationImpl:
            return chosen
        x, gamma, _ = inputs
        averages = [
            array for array in (function.running_mean, function.running_var) if array is not None
        ]
        goes = (
            module.backend.get_array_module(x) is module.cuda.cupy
            and _is_plain((x,), function.input_layouts)
            and function.key_axis == (1,)
            and x.ndim == 4
            and _name(x.dtype) in graphs.DTYPES
            and all(array.dtype == STATISTICS for array in (gamma, *averages))
            # cuDNN updates them in place.
            and all(array.flags.c_contiguous for array in averages)
            and len(x) <= MOST_IMAGES
            and graphs.fits(x.shape)
            # One value has no unbiased variance.
            and x.size > x.shape[1]
            and normalizers().runner.gpu.capability() >= CAPABILITY
        )
        if not goes:
            return chosen
        stays_last = layout.is_kept(x) and x.shape[1] % DIVISOR_OF_CHANNELS == 0
        return OfChannelsLast() if stays_last else ByCudnn()

    return select


def _is_plain(arrays: Sequence[Any], layouts: Sequence[Any]) -> bool:
    """Return whether cuDNN may be used, and arrays have one dtype and the usual axis order."""
    return (
        _setting("use_cudnn", auto=True)
        and set(layouts) == {None}
        and len({array.dtype for array in arrays}) == 1
    )


def _demands(dtype: Any) -> tuple[str, bool, bool]:
    """Return a dtype's name, and whether to use tensor cores and to be deterministic."""
    name = _name(dtype)
    tensor_cores = _setting("use_cudnn_tensor_core", auto=name == "float16")
    return name, tensor_cores, bool(_config().cudnn_deterministic)


def _is_channels_last(computes: graphs.Name, first: Any, second: Any) -> bool:
    """Return whether the mode asks for channels last, or a gradient goes on with it.

    Backward may run outside of the ``using_config`` that forward ran in. Images of others may lie
    channels last, such as those of a file, and nobody asks for more.
    """
    if layout.is_wanted(first.dtype):
        return True
    return computes != "y" and layout.is_kept(second if computes == "w" else first)


@functools.cache
def _name(dtype: Any) -> str:
    """Return the name of a dtype; cached, because NumPy is slow at this."""
    return str(dtype.name)


def _setting(name: str, *, auto: bool) -> bool:
    """Return whether a setting of Chainer is on, given the meaning of ``auto``."""
    value = getattr(_config(), name)
    if value not in ("always", "auto", "never"):
        raise ValueError(
            f"chainer.config.{name} must be 'always', 'auto' or 'never', got {value!r}"
        )
    return auto if value == "auto" else value == "always"


@functools.cache
def _config() -> Any:
    return importlib.import_module("chainer.configuration").config


def _insist_on_frontend() -> None:
    if importlib.util.find_spec("cudnn") is None:
        raise RuntimeError(
            "CHAINER_COMPAT_CUDNN=1 asks for cuDNN, but nvidia-cudnn-frontend is not installed. "
            "Install it and cuDNN: pip install 'nvidia-cudnn-frontend>=1.32' "
            "'nvidia-cudnn-cu13>=9', or nvidia-cudnn-cu12 for CUDA 12; or unset the variable"
        )
