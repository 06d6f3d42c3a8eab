"""The functions to measure one by one, in Chainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from benchmarks.functions import CASES, Case
from benchmarks.ranks.orders import Step

Arrays = Sequence[chainer.Variable]


def step_of(name: str, backward: bool) -> Step:
    """Return a step that computes a function or its gradients, from and to NumPy arrays."""
    case = CASES[name]
    function = make(case)
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in case.shapes]
    variables = [chainer.Variable(array) for array in arrays]
    if case.is_first:
        variables[0] = chainer.Variable(arrays[0], requires_grad=False)
    wanted = [variable for variable in variables if variable.requires_grad]
    y = function(variables)
    gy = random.normal(size=y.shape).astype(np.float32)

    def forward() -> None:
        np.asarray(function(variables).array)

    def gradients() -> None:
        for variable in wanted:
            variable.cleargrad()
        y.grad = gy
        y.backward()
        for variable in wanted:
            np.asarray(variable.grad)

    return gradients if backward else forward


def make(case: Case) -> Callable[[Arrays], chainer.Variable]:
    """Return the function of a case."""
    options: dict[str, Any] = case.options
    makers: dict[str, Callable[[Arrays], chainer.Variable]] = {
        "convolution": lambda xs: F.convolution_2d(*xs, **options),
        "deconvolution": lambda xs: F.deconvolution_2d(*xs, **options),
        "linear": lambda xs: F.linear(*xs),
        "batch normalization": lambda xs: F.batch_normalization(*xs),
        "relu": lambda xs: F.relu(xs[0]),
        "leaky relu": lambda xs: F.leaky_relu(xs[0], **options),
        "max pooling": lambda xs: F.max_pooling_2d(xs[0], **options),
        "average pooling": lambda xs: F.average_pooling_2d(xs[0], **options),
        "local response normalization": lambda xs: F.local_response_normalization(
            xs[0], 5, 2, options["alpha"] / 5
        ),
        "dropout": lambda xs: F.dropout(xs[0]),
        "add": lambda xs: xs[0] + xs[1],
        "concat": lambda xs: F.concat(xs),
        "sigmoid": lambda xs: F.sigmoid(xs[0]),
    }
    return makers[case.kind]
