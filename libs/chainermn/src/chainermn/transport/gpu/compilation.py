"""Let one rank compile kernels for all ranks of a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

#: A rank that has waited this many seconds compiles by itself. NVRTC takes much less.
SECONDS_TO_WAIT = 10


@contextmanager
def one_rank_at_a_time() -> Iterator[None]:
    """Keep the other ranks of this host out of this ``with`` block.

    The first rank writes a compiled kernel to CuPy's cache on disk, where the others find it.
    """
    with ExitStack() as stack:
        if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") in ("", "0"):
            from filelock import FileLock  # takes a while, and most ranks need no GPU

            # Do not fail if the cache cannot be found, written or locked.
            with suppress(OSError, RuntimeError):
                cache = os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy/kernel_cache"
                file = Path(cache) / f"chainermn-{os.uname().nodename}.lock"
                stack.enter_context(FileLock(file, SECONDS_TO_WAIT))
        yield
