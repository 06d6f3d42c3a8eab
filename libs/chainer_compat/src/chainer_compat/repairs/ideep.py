"""iDeep is gone; oneDNN stands in for it."""

import functools
import os
from types import ModuleType
from typing import Any

from chainer_compat.onednn import library


def onednn_may_compute() -> bool:
    library.load()
    return "CHAINER_USE_IDEEP" not in os.environ


def onednn_is_there() -> bool:
    library.load()
    return True


def compute_with_onednn(module: ModuleType) -> None:
    """Let oneDNN compute what it can where the user has not said whether to."""
    module.global_config.use_ideep = "auto"


def only_by_channel(module: ModuleType) -> None:
    """Leave the batch normalization by another axis than the channels to NumPy.

    Chainer asks iDeep for each that has a single axis, and gets the one by channel.
    """
    mode = module._BNMode
    init = mode.__init__

    @functools.wraps(init)
    def wrapped(self: Any, x: Any, gamma: Any, key_axis: tuple[int, ...], **options: Any) -> None:
        init(self, x, gamma, key_axis, **options)
        self.ideep_ok = self.ideep_ok and key_axis == (1,)

    mode.__init__ = wrapped
