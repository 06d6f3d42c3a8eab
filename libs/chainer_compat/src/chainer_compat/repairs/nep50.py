"""Under NEP 50 the type of a sum no longer depends on the values (NumPy 2, CuPy 14).

Before NEP 50, ``0.0 + numpy.float16(2)`` was a float64. Now it is a float16, so sums that Chainer
starts from a plain 0 silently lose precision or overflow. On the other hand,
``float32_array + numpy.float64(1)`` was a float32, and is now a float64, as is
``float32_array + numpy.int64(1)``.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery

#: Classes that compute with numbers among their arguments, by module of `chainer.functions`.
#: All other functions of Chainer convert such numbers themselves.
TAKE_NUMBERS = {
    "math.clip": "Clip",
    "normalization.batch_normalization": "FixedBatchNormalization",
    "normalization.batch_renormalization": "BatchRenormalizationFunction",
    "normalization.layer_normalization": "LayerNormalization",
    "normalization.local_response_normalization": "LocalResponseNormalization",
}


def zero_no_longer_widens() -> bool:
    return (0.0 + numpy.float32(0)).dtype != numpy.float64


def float64_scalars_widen() -> bool:
    return (numpy.zeros(1, numpy.float32) + numpy.float64(0)).dtype != numpy.float32


def widen(value: Any) -> Any:
    """Turn a NumPy or CuPy number narrower than 64 bits into a float64."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or dtype.kind not in "biuf" or dtype.itemsize >= 8 or value.ndim != 0:
        return value
    if isinstance(value, numpy.generic | numpy.ndarray):
        return numpy.float64(value)
    with value.device:
        return value.astype("d")


def sum_in_float64(values: list[Any]) -> Any:
    """Sum numbers as the builtin ``sum`` did before NEP 50; CuPy has not changed."""
    return sum(widen(value) if isinstance(value, numpy.generic) else value for value in values)


def summarize_in_float64(module: ModuleType) -> None:
    """Accumulate the statistics of a log in float64."""
    add = module.Summary.add

    @surgery.replaces(module.Summary, "add")
    def wrapped(self: Any, value: Any, weight: Any = 1) -> None:
        add(self, widen(value), widen(weight))


def average_in_float64(module: ModuleType) -> None:
    """Accumulate numerator and denominator of ``MicroAverage`` in float64."""
    call = module.MicroAverage.__call__

    @surgery.replaces(module.MicroAverage, "__call__")
    def wrapped(self: Any, trainer: Any) -> None:
        # Widening a sum before the next term joins it makes the new sum a float64.
        self._numerator = _as_float64(self._numerator)
        self._denominator = _as_float64(self._denominator)
        call(self, trainer)


def clip_in_float64(module: ModuleType) -> None:
    """Sum the squared norms of float16 gradients in float64, since they soon exceed 65504."""
    module._sum_sqnorm_grads = surgery.with_globals(  # type: ignore[attr-defined]
        module._sum_sqnorm_grads, sum=sum_in_float64
    )


def plain_hyperparameters(module: ModuleType) -> None:
    """Keep the hyperparameters of optimizers as Python numbers, such as ``lr = numpy.cos(t)``."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, _plain(value))

    module.Hyperparameter.__setattr__ = set_attribute


def plain_numbers(class_name: str) -> Callable[[ModuleType], None]:
    """Return a repair that makes a function store its arguments as Python numbers."""

    def repair(module: ModuleType) -> None:
        cls = getattr(module, class_name)
        init = cls.__init__

        @surgery.replaces(cls, "__init__")
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            for name, value in vars(self).items():
                setattr(self, name, _plain(value))

    return repair


def _plain(value: Any) -> Any:
    """Turn a NumPy scalar into a Python number, whose type does not count in a sum."""
    return value.item() if isinstance(value, numpy.number) else value


def _as_float64(value: Any) -> Any:
    return numpy.float64(value) if isinstance(value, int | float) else widen(value)
