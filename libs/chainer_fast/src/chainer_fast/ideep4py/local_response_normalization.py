"""``localResponseNormalization`` across channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from chainer_fast.ideep4py.arrays import mdarray, result
from chainer_fast.onednn import operations
from chainer_fast.onednn.layouts import blocked, channels_last
from chainer_fast.onednn.primitives import Arg, Tensor


@dataclass(frozen=True)
class localResponseNormalizationParam:
    """Number of neighboring channels, and constants of the formula; ``alpha`` is times ``n``."""

    n: int
    k: float
    alpha: float
    beta: float
    kind: int

    lrn_across_channels: ClassVar[int] = operations.LRN

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """The same for oneDNN, where the number of channels is odd and includes the channel."""
        n = 2 * (self.n // 2) + 1
        return n, self.k, self.alpha / self.n * n, self.beta


def Forward(x: mdarray, param: localResponseNormalizationParam) -> tuple[Any, mdarray | None]:
    """Return the result, and the workspace for the gradient, if there is one."""
    source = _in_fast_layout(x, param)
    primitive = operations.local_response_normalization(source.layout, *param.numbers)
    y, *workspace = primitive.run({Arg.SRC: source})
    return result(y), mdarray(workspace[0]) if workspace else None


def Backward(
    x: mdarray, gy: mdarray, workspace: mdarray | None, param: localResponseNormalizationParam
) -> Any:
    """Return the gradient of ``x``."""
    source = _in_fast_layout(x, param)
    operands = {Arg.SRC: source, Arg.DIFF_DST: gy.tensor}
    if workspace is not None:
        operands[Arg.WORKSPACE] = workspace.tensor
    primitive = operations.local_response_normalization_backward(source.layout, *param.numbers)
    return result(*primitive.run(operands))


def _in_fast_layout(x: mdarray, param: localResponseNormalizationParam) -> Tensor:
    """Return images in a layout where oneDNN does not sum channel by channel."""
    if param.numbers[0] == 5 and blocked(x.shape).is_full:
        return x.tensor.in_layout(blocked(x.shape))
    return x.tensor.in_layout(channels_last(x.shape))
