"""Make ``compute_mode='cudnn_fast'`` a name for channels-last images under unchanged shapes.

In Chainer, it makes links that take images of another shape, which most functions refuse.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from chainer_compat import settings, surgery
from chainer_fast.channels_last import layout

#: ``CHAINER_COMPAT_CUDNN=1``: let cuDNN compute what it can, through nvidia-cudnn-frontend.
CUDNN = "CHAINER_COMPAT_CUDNN"
#: ``CHAINER_CHANNELS_LAST=1``: start with ``compute_mode='cudnn_fast'``.
CHANNELS_LAST = "CHAINER_CHANNELS_LAST"


def links_have_modes() -> bool:
    """Return True: Chainer's own links do."""
    return True


def make_ordinary_links(module: ModuleType) -> None:
    """Make the same links in every mode, which is looked at in each call instead."""
    init = module.Convolution2D.__init__

    @surgery.replaces(module.Convolution2D, "__init__")
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with module.chainer.using_config("compute_mode", None):
            init(self, *args, **kwargs)


def start_with_channels_last(module: ModuleType) -> None:
    """Set ``compute_mode`` for all threads.

    Raises
    ------
    RuntimeError
        If cuDNN is not asked for.
    """
    insist_on_cudnn()
    module.global_config.compute_mode = layout.MODE


def insist_on_cudnn() -> None:
    """Refuse channels last without cuDNN.

    Raises
    ------
    RuntimeError
        If cuDNN is not asked for. The message says what to do.
    """
    if not settings.is_on(CUDNN):
        raise RuntimeError(
            f"compute_mode={layout.MODE!r} (or {CHANNELS_LAST}=1) asks for channels-last images, "
            f"which need cuDNN: set {CUDNN}=1 before the program starts, or use "
            "compute_mode=None"
        )
