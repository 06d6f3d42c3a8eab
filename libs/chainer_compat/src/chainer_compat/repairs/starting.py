"""What ``import chainer`` loads for functions that a program may never call."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainer_compat import surgery

# Modules of Chainer's, and the part of SciPy that each of them imports.
USERS_OF_SCIPY = {
    "datasets.svhn": "io",
    "distributions.multivariate_normal": "linalg",
    "functions.math.erfcinv": "special",
    "functions.math.erfcx": "special",
    "functions.math.erfinv": "special",
    "functions.math.ndtri": "special",
    "functions.math.sparse_matmul": "sparse",
}


class WhenUsed(ModuleType):
    """Stands in for a module, which it imports when a name of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def has_scipy() -> bool:
    # To import it would take longer than all else, at every import of Chainer.
    with contextlib.suppress(ValueError):  # loaded already, in an unusual way
        if importlib.util.find_spec("scipy") is None:
            raise ImportError("No module named 'scipy'")
    return True


def scipy_when_used(part: str) -> Callable[[ModuleType], None]:
    """Return a repair of a module that executes ``from scipy import part``, or the like."""

    def repair(module: ModuleType) -> None:
        scipy = WhenUsed("scipy")
        setattr(scipy, part, WhenUsed(f"scipy.{part}"))
        surgery.substitute_imports(module, {"scipy": scipy, f"scipy.{part}": scipy})

    return repair
