"""The step that this thread takes, if functions in it may be fused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from chainer_fast.cudnn.fused_normalization import Normalization


class Step(Protocol):
    """What Chainer's functions tell the step, and ask it; `fusing` has the steps."""

    def normalize(self, normalization: Normalization) -> Any:
        """Return the result of a normalization, or an array for it."""

    def add(self, inputs: tuple[Any, Any], compute: Callable[[], Any]) -> Any:
        """Return a sum, or an array for it."""

    def rectify(self, x: Any) -> tuple[Any, Normalization] | None:
        """Return the result of ReLU, and the normalization that was computed with it, if any."""

    def read(self, array: Any) -> None:
        """Take note that code other than Chainer's functions reads an array."""


_of_thread = threading.local()


def current_step() -> Step | None:
    """Return this thread's step; None if nothing is to be fused."""
    return getattr(_of_thread, "step", None)


@contextlib.contextmanager
def taking_part(step: Step) -> Iterator[None]:
    """Let functions in the ``with`` block, on this thread, know the step."""
    before, _of_thread.step = current_step(), step
    try:
        yield
    finally:
        _of_thread.step = before
