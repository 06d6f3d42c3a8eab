"""Whether Chainer imports and computes."""

from __future__ import annotations


def examine() -> list[str]:
    """Return what Chainer computes wrongly."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    wrong = []
    linear = L.Linear(3, 2, initialW=np.arange(6, dtype=np.float32).reshape(2, 3))
    linear.cleargrads()
    x = chainer.Variable(np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    y = linear(x)
    F.sum(y * y).backward()
    if y.array.tolist() != [[8, 26], [17, 62]]:
        wrong.append("the forward pass of a Linear link")
    if linear.W.grad.tolist() != [[152, 202, 252], [548, 724, 900]]:
        wrong.append("the backward pass of a Linear link")
    summary = chainer.reporter.Summary()
    for _ in range(40_000):
        summary.add(np.float16(2))
    if summary.compute_mean() != 2:
        wrong.append("the mean of float16 values in a Summary")
    return wrong
