"""What iDeep is told about a window that moves over images."""

from __future__ import annotations

from dataclasses import dataclass

from chainer_compat.onednn.operations import Window


@dataclass(frozen=True)
class WindowParam:
    """The shape of what is computed, one pair of numbers, and how the window moves.

    The pair is what kinds of windows differ in: the dilations of a convolution, or the size of a
    pooling's window.
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
        """Return how the window moves, in oneDNN's words."""
        return Window((self.sy, self.sx), dilations, (self.ph, self.pw), (self.pd, self.pr))
