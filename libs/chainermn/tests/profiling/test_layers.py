"""Functions that undo channels last are marked in the spans of layers."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from chainermn import spans
from chainermn.profiling.layers import layer_spans
from chainermn.profiling.timeline import conversions
from chainermn.spans import Span


class Undo(chainer.FunctionNode):
    """Returns images in Chainer's order."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (np.ascontiguousarray(inputs[0]),)

    def backward(self, indexes: Any, gys: Any) -> Any:
        return gys


class Block(chainer.Chain):
    def forward(self, x: chainer.Variable) -> chainer.Variable:
        h = Undo().apply((2 * x,))[0]
        return F.sum(h + 1)


def test_functions_that_undo_channels_last() -> None:
    network = chainer.Chain()
    with network.init_scope():
        network.block = Block()
    stored = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("f")
    heard: list[Span] = []
    spans.listen(heard.append)
    try:
        with layer_spans():
            # Also with one channel, and with one pixel, which lie in both orders.
            for images in (stored, stored[..., :1], stored[:, :1, :1]):
                x = chainer.Variable(images.transpose(0, 3, 1, 2).copy("K"))
                network.block(x).backward()
    finally:
        spans.unlisten(heard.append)
    marks = [span for span in heard if span.name == conversions.NAME]
    assert [dict(mark.details) for mark in marks] == [
        {"function": "Undo", "link": "block (Block)"},
    ]
