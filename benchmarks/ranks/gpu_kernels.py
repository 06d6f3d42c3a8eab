"""On one GPU: run a kernel for channels-last images, or copy as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels import CASES
from benchmarks.ranks.gpu_copies import timed, zeros
from benchmarks.ranks.orders import Orders, Step
from chainer_fast.channels_last import layout
from chainer_fast.channels_last.kernels import the_kernels


def run(orders: Orders) -> None:
    orders.obey(lambda what, **options: PREPARE[what](**options))


def kernel(name: str) -> Step:
    """Return a step that runs a kernel."""
    return timed(prepare(name))


def prepare(name: str) -> Callable[[], Any]:
    """Return a function that runs a kernel on arrays that exist already."""
    case = CASES[name]
    half = np.dtype(np.float16)
    first, *others = [channels_last(shape, half) for shape in case.shapes]
    method = getattr(the_kernels(), case.method)
    if case.method == "padded":
        first = zeros(first.size, half).reshape(first.shape)
    if not case.method.endswith("gradient"):
        return lambda: method(first, *others, **case.options)
    (gy,) = others
    # Most pixels are not the maximum of their window, and zero is the first place.
    places = [channels_last(gy.shape, np.dtype(np.uint8))] if "max" in case.method else []
    return lambda: method(gy, *places, shape=first.shape, **case.options)


def channels_last(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    array = zeros(int(np.prod(shape)), dtype)
    if len(shape) < 4:
        return array
    n, c, h, w = shape
    return layout.as_shaped(array.reshape(n, h, w, c))


def copy(n_bytes: int) -> Step:
    """Return a step with a plain copy."""
    into, source = (zeros(n_bytes, np.dtype(np.uint8)) for _ in range(2))

    def once() -> None:
        into[...] = source

    return timed(once)


PREPARE: dict[str, Callable[..., Step]] = {"kernel": kernel, "copy": copy}
