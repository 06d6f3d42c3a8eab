"""Find the extension of a trainer that makes a call.

Chainer has no interface that tells which extension runs: only a variable of `Trainer.run` does. To
avoid reading it, Chainer would have to be patched, which this library does not do.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from chainer.training import Trainer

_RUN = Trainer.run.__code__
_METHODS = ("__call__", "initialize", "finalize", "on_error")


def extension_at_work(frame: FrameType) -> str:
    """Return the extension that called this frame, for messages; empty if none did.

    Parameters
    ----------
    frame : frame
        Frame of the calling thread; it is not safe to read those of other threads.
    """
    inner, outer = frame, frame.f_back
    while outer is not None and outer.f_code is not _RUN:
        inner, outer = outer, outer.f_back
    if outer is None or "entry" not in outer.f_locals:
        return ""
    # In `Trainer.run` this variable keeps its latest extension, whatever it calls now.
    extension: Any = outer.f_locals["entry"].extension
    own = (extension, *(getattr(extension, name, None) for name in _METHODS))
    if not any(getattr(function, "__code__", None) is inner.f_code for function in own):
        return ""
    return f"extension {extension.name!r} ({type(extension).__name__})"
