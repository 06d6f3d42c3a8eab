"""Keep images channels last: functions give what they get.

CuPy gives results in C order, whatever the strides of its inputs are. So functions get views with
axes in the order of memory, and views of their results have Chainer's shapes again. Functions that
are not named here, or in ``reductions``, give correct arrays in C order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.channels_last.layout import as_shaped, as_stored, is_kept

Forward = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]

#: Elementwise functions, by module of ``chainer.functions``, with the names of their attributes
#: that are arrays of the same shape, or None until ``forward`` sets them.
ELEMENTWISE: dict[str, dict[str, tuple[str, ...]]] = {
    "activation.relu": {"ReLU": (), "ReLUGrad2": ("b",)},
    "activation.leaky_relu": {"LeakyReLU": (), "_LeakyReLUGrad": ("cond",)},
    "activation.clipped_relu": {"ClippedReLU": (), "ClippedReLUGrad2": ("x",)},
    "activation.elu": {"ELU": (), "ELUGrad": ("cond",)},
    "activation.sigmoid": {"Sigmoid": (), "SigmoidGrad": ()},
    "activation.tanh": {"Tanh": (), "TanhGrad": ()},
    "math.basic_math": {
        "Add": (),
        "AddConstant": (),
        "MultiAdd": (),
        "Sub": (),
        "SubFromConstant": (),
        "Mul": (),
        "MulConstant": (),
        "Neg": (),
    },
    "noise.dropout": {"Dropout": ("mask",), "DropoutGrad": ("mask",)},
}
#: Where ``as_stored`` puts each axis.
_PLACES = (0, 3, 1, 2)
#: The axes of a batch of images over which statistics are taken, and the place of channels.
_BY_CHANNEL = (0, 2, 3), (None, slice(None), None, None)
_BY_CHANNEL_STORED = (0, 1, 2), (None, None, None, slice(None))


def array_type() -> type[Any]:
    """Return the type of CuPy's arrays."""
    found: type[Any] = _cuda().ndarray
    return found


def keep_layout(functions: ModuleType) -> None:
    """Let elementwise functions, concatenation and batch normalization keep the layout."""
    for path, owners in ELEMENTWISE.items():
        module = importlib.import_module(f"{functions.__name__}.{path}")
        for name, held in owners.items():
            owner = getattr(module, name)
            method = "forward_gpu" if "forward_gpu" in vars(owner) else "forward"
            setattr(owner, method, elementwise(getattr(owner, method), held))
    concat = importlib.import_module(f"{functions.__name__}.array.concat").Concat
    concat.forward = concatenate(concat.forward)
    name = f"{functions.__name__}.normalization.batch_normalization"
    keep_layout_of_normalization(importlib.import_module(name))


def elementwise(own: Forward, held: Sequence[str] = ()) -> Forward:
    """Return an elementwise ``forward`` that keeps the layout.

    Parameters
    ----------
    own
        Chainer's ``forward``, or one that has replaced it.
    held
        Names of attributes with arrays of the same shape.
    """

    @functools.wraps(own)
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        found = {name: getattr(self, name) for name in held}
        given = {name: array for name, array in found.items() if array is not None}
        if not _keep_layout((*inputs, *given.values())):
            return own(self, inputs)
        with _attributes(self, **{name: as_stored(array) for name, array in given.items()}):
            results = own(self, tuple(map(as_stored, inputs)))
        for name in found.keys() - given.keys():
            setattr(self, name, as_shaped(getattr(self, name)))
        return tuple(map(as_shaped, results))

    return forward


def concatenate(own: Forward) -> Forward:
    """Return a ``forward`` of Concat that keeps the layout, as views for its gradients do."""

    @functools.wraps(own)
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not _keep_layout(inputs):
            return own(self, inputs)
        with _attributes(self, axis=_PLACES[self.axis]):
            (result,) = own(self, tuple(map(as_stored, inputs)))
        return (as_shaped(result),)

    return forward


def keep_layout_of_normalization(module: ModuleType) -> None:
    """Let Chainer's own batch normalization, also with given statistics, keep the layout."""
    general = module.GeneralBatchNormalizationImpl
    normalized, gradients = module._apply_bn_fwd, general.backward
    fixed_gradients = module.FixedBatchNormalizationGrad.forward

    @surgery.replaces(module, "_apply_bn_fwd")
    def apply_(xp: Any, *arrays: Any) -> Any:
        if not _keep_layout(arrays):
            return normalized(xp, *arrays)
        return as_shaped(normalized(xp, *map(as_stored, arrays)))

    @surgery.replaces(general, "backward")
    def backward(
        self: Any,
        axis: Any,
        gamma: Any,
        gy: Any,
        x: Any,
        x_layout: Any,
        xp: Any,
        expander: Any,
        *rest: Any,
    ) -> tuple[Any, ...]:
        if (axis, expander) != _BY_CHANNEL or not _keep_layout((x, gy)):
            return gradients(self, axis, gamma, gy, x, x_layout, xp, expander, *rest)
        axis, expander = _BY_CHANNEL_STORED
        gx, *others = gradients(
            self, axis, gamma, as_stored(gy), as_stored(x), x_layout, xp, expander, *rest
        )
        return as_shaped(gx), *others

    @surgery.replaces(module.FixedBatchNormalizationGrad, "forward")
    def forward(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *statistics, gy = inputs
        if (self.axis, self.expander) != _BY_CHANNEL or not _keep_layout((x, gy)):
            return fixed_gradients(self, inputs)
        axis, expander = _BY_CHANNEL_STORED
        with _attributes(self, axis=axis, expander=expander):
            gx, *others = fixed_gradients(self, (as_stored(x), *statistics, as_stored(gy)))
        return as_shaped(gx), *others


def _keep_layout(arrays: Sequence[Any]) -> bool:
    """Return whether arrays are CuPy's with 4 axes, and one of them is to stay channels last."""
    gpu_array = array_type()
    return all(type(array) is gpu_array and array.ndim == 4 for array in arrays) and any(
        map(is_kept, arrays)
    )


@functools.cache
def _cuda() -> Any:
    return importlib.import_module("chainer.backends.cuda")


@contextmanager
def _attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
