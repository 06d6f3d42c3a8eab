"""Parameters of a window that moves over images, in iDeep's form."""

from __future__ import annotations

from dataclasses import dataclass

from chainer_fast.onednn.operations import Window


@dataclass(frozen=True)
class WindowParam:
    """The shape of the result, a pair of numbers, and the movement of the window.

    The pair depends on the kind of window: the dilations of a convolution, or the size of a
    pooling window.
    """

    out_shape: tuple[int, int, int, int]
    y: int
    x: int
    sy: int
    sx: int
    ph: int
    pw: int
    pd: int
    pr: int

    def moving(self, dilations: tuple[int, int]) -> Window:
        """Return the movement of the window, in oneDNN's terms."""
        return Window((self.sy, self.sx), dilations, (self.ph, self.pw), (self.pd, self.pr))
