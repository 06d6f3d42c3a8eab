"""When Python looks for garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Look for no garbage while modules are imported: what they define stays.

    Python looks again and again while it creates many objects, sometimes through all that there
    are. With Chainer in memory, that took more time than the imports that had caused it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
