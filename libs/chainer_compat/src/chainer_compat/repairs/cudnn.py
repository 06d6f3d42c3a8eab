"""cuDNN brought back, where it is asked for: which of Chainer's calls go to it.

What does not go there takes the way it takes without: Chainer's own code on the GPU. That is
decided beforehand, from shapes, dtypes and settings. A failure of cuDNN's is raised.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from chainer_compat.cudnn import graphs
from chainer_compat.cudnn.normalization import MOST_IMAGES, STATISTICS, Normalizer, the_normalizer
from chainer_compat.cudnn.runner import Runner, the_runner

# What of cuDNN 9.28 is needed, libcudnn_cnn and libcudnn_ops, has code for Turing and newer only.
# For Volta it makes plans all the same.
CAPABILITY = 75

Runners = Callable[[], Runner]
Forward = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
Pose = Callable[[Any, tuple[Any, ...]], graphs.Convolution | None]


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
    """Let cuDNN normalise batches during training. It has nothing for given statistics."""
    _insist_on_frontend()
    own = module._impl_selector
    selector = select_normalization(module)
    module._impl_selector = selector  # type: ignore[attr-defined]
    init = module.BatchNormalization.__init__
    if own not in init.__defaults__:
        raise LookupError("BatchNormalization was expected to have _impl_selector for a default")
    init.__defaults__ = tuple(selector if value is own else value for value in init.__defaults__)


def convolve(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Convolution2DFunction: cuDNN's, or else its own."""

    def pose(self: Any, inputs: tuple[Any, ...]) -> graphs.Convolution | None:
        if not _is_plain(inputs, self.input_layouts) or self.cover_all:
            return None
        x, w = inputs[:2]
        geometry = _geometry(self)
        y_shape = graphs.convolved(x.shape, w.shape, **geometry)
        return graphs.Convolution(
            computes="y", x=x.shape, w=w.shape, y=y_shape, **geometry, **_demands(x.dtype)
        )

    return _route(own, runners, pose, ("x", "w"))


def deconvolve(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Deconvolution2DFunction: cuDNN's, or else its own."""

    def pose(self: Any, inputs: tuple[Any, ...]) -> graphs.Convolution | None:
        if not _is_plain(inputs, self.input_layouts):
            return None
        y, w = inputs[:2]
        self._calc_out_size(y.shape, w.shape)
        self._set_cover_all(y.shape, w.shape)
        x_shape = (y.shape[0], w.shape[1] * self.groups, int(self.outh), int(self.outw))
        return graphs.Convolution(
            computes="x", x=x_shape, w=w.shape, y=y.shape, **_geometry(self), **_demands(y.dtype)
        )

    return _route(own, runners, pose, ("y", "w"))


def correlate(own: Forward, runners: Runners = the_runner) -> Forward:
    """Return a ``forward`` of Convolution2DGradW: cuDNN's, or else its own."""

    def pose(self: Any, inputs: tuple[Any, ...]) -> graphs.Convolution | None:
        x, y = inputs
        if x.dtype != self.W_dtype or not _is_plain(inputs, (*self.input_layouts, self.w_layout)):
            return None
        w_shape = tuple(self.W_shape)
        return graphs.Convolution(
            computes="w", x=x.shape, w=w_shape, y=y.shape, **_geometry(self), **_demands(x.dtype)
        )

    return _route(own, runners, pose, ("x", "y"))


def _route(own: Forward, runners: Runners, pose: Pose, names: tuple[str, str]) -> Forward:
    """Return a ``forward`` that has cuDNN solve what ``pose`` poses, if that is possible.

    Parameters
    ----------
    own
        Chainer's, for everything else.
    runners
        Returns what runs cuDNN.
    pose
        Returns the problem of a call, or None.
    names
        In the problem, of the first two inputs. A third one is the bias.
    """

    @functools.wraps(own)
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        problem = pose(self, inputs)
        if problem is None or not problem.is_possible or runners().gpu.capability() < CAPABILITY:
            return own(self, inputs)
        self.retain_inputs((0, 1))
        arrays = dict(zip(names, inputs[:2], strict=True))
        result = runners().run(problem, **arrays)[problem.computes]
        for bias in inputs[2:]:
            result += bias.reshape(1, -1, 1, 1)
        return (result,)

    return forward


def select_normalization(
    module: ModuleType, normalizers: Callable[[], Normalizer] = the_normalizer
) -> Callable[..., Any]:
    """Return a selector of implementations for BatchNormalization: cuDNN's, or Chainer's."""
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
            y, mean, inv_std = normalizers().normalize(x, gamma, beta, eps, decay, averages)
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
            gx, ggamma, gbeta = normalizers().gradients(gy, x, gamma, mean, inv_std, eps)
            return gx, x_layout, ggamma, gbeta

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
            and x.dtype.name in graphs.DTYPES
            and all(array.dtype == STATISTICS for array in (gamma, *averages))
            # They are written where they are.
            and all(array.flags.c_contiguous for array in averages)
            and len(x) <= MOST_IMAGES
            and graphs.fits(x.shape)
            # The unbiased variance of one value is none.
            and x.size > x.shape[1]
            and normalizers().runner.gpu.capability() >= CAPABILITY
        )
        return ByCudnn() if goes else chosen

    return select


def _is_plain(arrays: Sequence[Any], layouts: Sequence[Any]) -> bool:
    """Return whether cuDNN may be used, on arrays of one dtype in the usual order of axes."""
    return (
        _setting("use_cudnn", always=True, auto=True, never=False)
        and all(layout is None for layout in layouts)
        and all(array.dtype == arrays[0].dtype for array in arrays)
    )


def _geometry(function: Any) -> dict[str, Any]:
    pairs = {
        "stride": (function.sy, function.sx),
        "pad": (function.ph, function.pw),
        "dilate": (function.dy, function.dx),
    }
    # They are what the caller gave: NumPy's integers, for instance, or an array.
    return {name: (int(rows), int(columns)) for name, (rows, columns) in pairs.items()}


def _demands(dtype: Any) -> dict[str, Any]:
    """Return what Chainer's configuration demands of arithmetic with a dtype."""
    return {
        "dtype": dtype.name,
        "tensor_cores": _setting(
            "use_cudnn_tensor_core", always=True, auto=dtype == "float16", never=False
        ),
        "deterministic": bool(_config().cudnn_deterministic),
    }


def _setting(name: str, **meanings: bool) -> bool:
    value = getattr(_config(), name)
    if value not in meanings:
        raise ValueError(
            f"chainer.config.{name} is {value!r}, but has to be one of {', '.join(meanings)}"
        )
    return meanings[value]


def _config() -> Any:
    return importlib.import_module("chainer.configuration").config


def _insist_on_frontend() -> None:
    if importlib.util.find_spec("cudnn") is None:
        raise RuntimeError(
            "CHAINER_COMPAT_CUDNN=1 asks for cuDNN, but nvidia-cudnn-frontend is not installed. "
            "Install it and cuDNN: pip install 'nvidia-cudnn-frontend>=1.32' "
            "'nvidia-cudnn-cu13>=9', or nvidia-cudnn-cu12 for CUDA 12; or unset the variable"
        )
