"""cuDNN's frontend on the null GPU: graphs are checked as the stand-in does it, and do nothing."""

import ctypes
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "libs/chainer_fast/tests"))

from fake_cudnn.cudnn import *  # type: ignore[import-not-found]  # noqa: F403
from fake_cudnn.cudnn import Handle, pygraph

# Whoever loads libcudnn.so.9 gets this one.
_library = ctypes.CDLL(str(Path(os.environ["CHAINERMN_NULL_GPU"], "libcudnn.so.9")))


def set_stream(handle: Handle, stream: int) -> None:
    _library.cudnnSetStream(None, ctypes.c_void_p(stream))


def compute_at(self: pygraph, pointers: object, workspace: object, handle: Handle) -> None:
    if error := _library.cudnnBackendExecute(None, None, None):
        raise RuntimeError(f"the null GPU refused a kernel of cuDNN: {error}")


pygraph.compute_at = compute_at
