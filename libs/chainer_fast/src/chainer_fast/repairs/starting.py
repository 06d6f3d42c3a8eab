"""Let ``import chainer`` skip SciPy: only functions that a program may never call need it."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainer_compat import surgery

# Modules of Chainer, with the part of SciPy that each imports.
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
    """Stands in for a module, and imports it on first access to one of its names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def scipy_when_used(part: str) -> Callable[[ModuleType], None]:
    """Return a repair for a module that executes ``from scipy import part`` or similar."""

    def repair(module: ModuleType) -> None:
        scipy = WhenUsed("scipy")
        setattr(scipy, part, WhenUsed(f"scipy.{part}"))
        surgery.substitute_imports(module, {"scipy": scipy, f"scipy.{part}": scipy})

    return repair
