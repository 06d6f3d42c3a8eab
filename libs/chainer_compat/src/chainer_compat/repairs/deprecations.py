"""Functions of NumPy and Python that warn or are gone."""

import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery


def third_argument_of_maximum_warns() -> bool:
    zero = numpy.zeros(1)
    return _warns(lambda: numpy.maximum(zero, zero, zero))


def fix_warns() -> bool:
    return _warns(lambda: numpy.fix(0.5))


def setting_a_shape_warns() -> bool:
    return _warns(lambda: setattr(numpy.zeros(2), "shape", (1, 2)))


def set_daemon_warns() -> bool:
    return _warns(lambda: threading.Thread().setDaemon(True))


def pass_out_by_name(module: ModuleType) -> None:
    """Call ``numpy.maximum`` with ``out=`` in the function that pads a batch."""

    def maximum(first: Any, second: Any, out: Any) -> Any:
        return numpy.maximum(first, second, out=out)

    module._concat_arrays_with_padding = surgery.with_globals(  # type: ignore[attr-defined]
        module._concat_arrays_with_padding, numpy=surgery.view(numpy, maximum=maximum)
    )


def fix_is_trunc(module: ModuleType) -> None:
    """Call ``trunc`` instead of ``fix``."""
    surgery.rename(module.fix, "fix", "trunc")


def set_daemon_by_attribute(module: ModuleType) -> None:
    """Give the prefetching thread a ``setDaemon`` that does not warn."""

    class Thread(threading.Thread):
        def setDaemon(self, daemonic: bool) -> None:
            self.daemon = daemonic

    loop = module._PrefetchLoop
    loop.launch_thread = surgery.with_globals(
        loop.launch_thread, threading=surgery.view(threading, Thread=Thread)
    )


def reshape_for_initializers(module: ModuleType) -> None:
    """Give ``Maxout``'s initializers a reshaped view instead of assigning to ``shape``."""
    initializer = module.initializer
    init = module.Maxout.__init__

    class Reshaped(initializer.Initializer):  # type: ignore[name-defined]
        def __init__(self, function: Any, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.function = function
            self.shape = shape

        def __call__(self, array: Any) -> None:
            self.function(array.reshape(self.shape))

    def reshaped(given: Any, shape: tuple[int, ...]) -> Any:
        is_function = callable(given) and not isinstance(given, initializer.Initializer)
        return Reshaped(given, shape) if is_function else given

    @surgery.replaces(module.Maxout, "__init__")
    def wrapped(
        self: Any,
        in_size: int | None,
        out_size: int,
        pool_size: int,
        initialW: Any = None,
        initial_bias: Any = 0,
    ) -> None:
        init(
            self,
            in_size,
            out_size,
            pool_size,
            reshaped(initialW, (out_size, pool_size, -1)),
            reshaped(initial_bias, (out_size, pool_size)),
        )


def _warns(action: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            action()
        except (Warning, AttributeError, TypeError):
            return True
    return False
