"""Processes that were started without a standard output, such as daemons."""

import os
import sys
from types import ModuleType

from chainer_compat import surgery


def there_is_no_output() -> bool:
    return sys.stdout is None


def print_nowhere(module: ModuleType) -> None:
    """Let the module see a standard output that discards everything, as ``print`` does."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    surgery.substitute_imports(module, {"sys": surgery.view(sys, stdout=nowhere)})
