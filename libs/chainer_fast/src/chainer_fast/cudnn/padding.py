"""Pad images of few channels with zeros: tensor cores read eight channels at once."""

from __future__ import annotations

from typing import Any

from chainer_fast.channels_last import layout
from chainer_fast.cudnn.graphs import Convolution
from chainer_fast.cudnn.runner import Runner

#: Images and filters with fewer channels are padded to this number.
FEWEST_CHANNELS = 8


def run(runner: Runner, problem: Convolution, first: Any, second: Any) -> Any:
    """Compute as `Runner.run` does, and pad images and filters if that is faster.

    Parameters
    ----------
    runner
        Runner that computes.
    problem, first, second
        Arguments of `Runner.run`.

    Returns
    -------
    array
        The result, without any padding, or None if cuDNN does not support the problem.
    """
    wide = padded(problem)
    if wide is problem:
        return runner.run(problem, first, second)
    pad = runner.gpu.padded
    if wide.computes == "y":
        return runner.run(wide, pad(first, FEWEST_CHANNELS), pad(second, FEWEST_CHANNELS))
    result = runner.run(wide, pad(first, FEWEST_CHANNELS), second)
    if result is None:
        return None
    return layout.as_shaped(runner.gpu.copy(layout.as_stored(result)[..., : problem.w[1]]))


def padded(problem: Convolution) -> Convolution:
    """Return a problem that has the same solution and more channels, or the problem itself."""
    # Padding a result gains nothing.
    if not problem.channels_last or problem.computes == "x":
        return problem
    # There may be groups, or shapes that do not match, if type checks are off.
    if problem.x[1] != problem.w[1] or problem.x[1] >= FEWEST_CHANNELS:
        return problem
    n, _, *size = problem.x
    filters, _, *window = problem.w
    wide = problem._replace(x=(n, FEWEST_CHANNELS, *size), w=(filters, FEWEST_CHANNELS, *window))
    return wide if wide.is_possible else problem
