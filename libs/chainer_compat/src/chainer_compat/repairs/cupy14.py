"""CuPy 14: no cuDNN, NVRTC includes float16 only on demand, ``atomicAdd`` is a template."""

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

from chainer_compat import surgery


def cupy_is_14() -> bool:
    cuda = importlib.import_module("chainer.backends.cuda")
    if not cuda.available:
        raise ImportError("CuPy is not installed, or cannot be imported")
    return bool(cuda._cupy_major >= 14)


def no_cudnn_warning(module: ModuleType) -> None:
    """Suppress the advice to reinstall CuPy with cuDNN, since there is no such CuPy."""
    module.check_cuda_available._already_warned = True


def include_float16(module: ModuleType) -> None:
    """Include CuPy's float16 in kernels that use it without a float16 argument."""
    cuda = module.cuda

    def elementwise(*args: Any, **kwargs: Any) -> Any:
        return cuda.elementwise(*args, preamble="#include <cupy/float16.cuh>\n", **kwargs)

    with_preamble = SimpleNamespace(elementwise=elementwise)
    for name in ("_memcpy_gather", "_memcpy_scatter"):
        function = surgery.with_globals(getattr(module, name), cuda=with_preamble)
        setattr(module, name, function)


def cast_negative_sampling(module: ModuleType) -> None:
    """Cast the addend of ``atomicAdd`` to the array's type, since float16 products are floats."""
    surgery.replace_text(
        module.NegativeSamplingFunctionGrad.forward_gpu,
        "gi * x[(i / m) * c + j])",
        "static_cast<T>(gi * x[(i / m) * c + j]))",
    )


def cast_hierarchical_softmax(module: ModuleType) -> None:
    """Do the same in the two additions of hierarchical softmax."""
    backward = module.BinaryHierarchicalSoftmaxFunction.backward_gpu
    for product in ("g * w[w_ind]", "g * x[x_ind]"):
        surgery.replace_text(backward, f"{product})", f"static_cast<T>({product}))")
