"""Names that NumPy 2 removed, and inputs that it refuses."""

from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery


def lacks_sctypes() -> bool:
    return not hasattr(numpy, "sctypes")


def lacks_float() -> bool:
    return not hasattr(numpy, "float")


def meshgrid_is_a_tuple() -> bool:
    return isinstance(numpy.meshgrid([0]), tuple)


def refuses_integers_out_of_range() -> bool:
    try:
        numpy.zeros(1, numpy.uint8)[:] = -1
    except OverflowError:
        return True
    return False


def arrays_have_a_device() -> bool:
    return hasattr(numpy.zeros(0), "device")


def provide_sctypes(module: ModuleType) -> None:
    """Let only this module see ``numpy.sctypes``."""
    sctypes = {
        "int": [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
        "float": [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
    }
    surgery.substitute_imports(module, {"numpy": surgery.view(numpy, sctypes=sctypes)})


def use_float64(module: ModuleType) -> None:
    """Use float64 where the module uses ``numpy.float``."""
    surgery.rename(module.compute_indices_and_weights, "float", "float64")


def index_by_a_tuple(module: ModuleType) -> None:
    """Index with a tuple of arrays, since a list of arrays no longer means the same."""

    def log_prob(self: Any, x: Any) -> Any:
        label = getattr(x, "array", x).astype(numpy.int32)
        grid = numpy.meshgrid(*(range(size) for size in self.batch_shape), indexing="ij")
        return self.log_p[(*grid, label)]

    module.Categorical.log_prob = log_prob


def wrap_padding(module: ModuleType) -> None:
    """Let a padding of -1 wrap around in unsigned arrays, as it does in C."""
    forward = module.PadSequence.forward

    @surgery.replaces(module.PadSequence, "forward")
    def wrapped(self: Any, xs: Any) -> Any:
        if isinstance(self.padding, int):
            self.padding = numpy.asarray(self.padding).astype(xs[0].dtype)[()]
        return forward(self, xs)


def print_cpu_in_capitals(module: ModuleType) -> None:
    """Print the device of a NumPy array as ``CPU``, as Chainer's documentation does."""
    debug_print = module.Variable.debug_print

    @surgery.replaces(module.Variable, "debug_print")
    def wrapped(self: Any) -> str:
        text: str = debug_print(self)
        return text.replace("\n- device: cpu\n", "\n- device: CPU\n")
