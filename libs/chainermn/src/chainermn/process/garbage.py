"""Control when Python collects garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Do not collect garbage during imports, whose objects stay alive anyway.

    While many objects are created, Python repeatedly looks for garbage, sometimes among all
    objects. With Chainer in memory, that took more time than the imports themselves.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
