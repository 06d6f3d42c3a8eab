"""Evaluate on all ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import chainer
import numpy as np
from chainer.dataset.convert import _call_converter

from chainermn import spans
from chainermn.agreement import run_together
from chainermn.arguments import check_communicator, check_has
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.generic_multi_node_evaluator import (
    GenericMultiNodeEvaluator,
    has_examples,
)
from chainermn.extensions.separate_models import SeparateModels
from chainermn.optimizers.settling import settle

__all__ = ["GenericMultiNodeEvaluator", "create_multi_node_evaluator"]

_WHERE = "create_multi_node_evaluator"

Evaluator = TypeVar("Evaluator")


def create_multi_node_evaluator(
    actual_evaluator: Evaluator,
    communicator: CommunicatorBase,
    *,
    mean_over: Literal["ranks", "examples"] = "ranks",
) -> Evaluator:
    """Make an evaluator report the mean over all ranks.

    Parameters
    ----------
    actual_evaluator : chainer.training.extensions.Evaluator
        Evaluator of the data of this rank, or any object whose ``evaluate`` returns a dict of
        numbers.
    communicator : CommunicatorBase
        Communicator of the ranks.
    mean_over : {'ranks', 'examples'}
        How to weight the results. ``'ranks'`` first averages the batches of each rank, then the
        ranks. This differs from the mean over all examples if ranks have different numbers of
        examples, or if batches have different sizes. ``'examples'`` weights every batch by its
        size, so the result does not depend on how the examples are divided. It needs an evaluator
        that converts batches and calls its function as Chainer's does.

    Returns
    -------
    Evaluator
        ``actual_evaluator`` itself. Its ``evaluate`` now returns, on every rank and for every key,
        the mean over the ranks that have this key. Every rank must call it. A rank without
        examples adds nothing. If ``evaluate`` raises on any rank, it raises on every rank. In a
        trainer with `chainermn.optimizers.LocalSGD`, parameters are averaged first.

    Raises
    ------
    TypeError
        If ``actual_evaluator`` has no ``evaluate``, or ``communicator`` is not a communicator.
    ValueError
        If ``mean_over`` is unknown.

    Examples
    --------
    >>> part = chainermn.scatter_dataset(data, comm)
    >>> test_iterator = chainer.iterators.SerialIterator(part, 4, repeat=False, shuffle=False)
    >>> evaluator = training.extensions.Evaluator(test_iterator, model)
    >>> evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    >>> trainer.extend(evaluator)
    >>> trainer.run()
    >>> sorted(evaluator())
    ['validation/main/accuracy', 'validation/main/loss']
    """
    call = f"{_WHERE}(actual_evaluator, communicator)"
    check_communicator(call, communicator, actual_evaluator)
    check_has(_WHERE, actual_evaluator, "an evaluator, with a method evaluate", "evaluate")
    if mean_over not in ("ranks", "examples"):
        raise ValueError(f"mean_over must be 'ranks' or 'examples', got {mean_over!r}")
    evaluate_locally = actual_evaluator.evaluate  # type: ignore[attr-defined]

    def weighted_results() -> dict[str, tuple[Any, float]]:
        iterators: dict[str, Any] = getattr(actual_evaluator, "get_all_iterators", dict)()
        if not all(map(has_examples, iterators.values())):
            return {}
        if mean_over == "ranks":
            return {key: (_to_number(value), 1) for key, value in evaluate_locally().items()}
        with _example_weights(actual_evaluator) as weight_of:
            found = evaluate_locally()
        return {key: (_to_number(value), weight_of(key)) for key, value in found.items()}

    updater: Any = None
    separate_models = SeparateModels(communicator)
    initialize_locally = getattr(actual_evaluator, "initialize", None)

    def initialize(trainer: chainer.training.Trainer) -> None:
        nonlocal updater
        updater = trainer.updater
        if initialize_locally is not None:
            initialize_locally(trainer)

    @spans.spanned("evaluation")
    def evaluate() -> dict[str, Any]:
        settle(updater, communicator)
        targets: dict[str, Any] = getattr(actual_evaluator, "get_all_targets", dict)()
        separate_models.warn(_WHERE, targets.values(), updater)
        own = run_together(communicator, "evaluate", weighted_results)
        by_rank = communicator.allgather_obj(own)
        means = {}
        for key in dict.fromkeys(key for result in by_rank for key in result):
            pairs = [result[key] for result in by_rank if key in result]
            total = sum(weight for _, weight in pairs)
            means[key] = sum(value * weight for value, weight in pairs) / total
        return means

    actual_evaluator.evaluate = evaluate  # type: ignore[attr-defined]
    actual_evaluator.initialize = initialize  # type: ignore[attr-defined]
    return actual_evaluator


@contextlib.contextmanager
def _example_weights(evaluator: Any) -> Iterator[Callable[[str], float]]:
    """Turn an evaluator's mean over batches into a mean over examples.

    Chainer's summaries accept a pair of a value and its weight, here the size of the batch.
    Yields a function that returns the number of examples in the mean for a key.
    """
    converter, function = evaluator.converter, evaluator.eval_func
    weights: Counter[str] = Counter()
    n_examples = batch_length = 0

    @chainer.dataset.converter()
    def convert(batch: Any, device: Any) -> Any:
        nonlocal n_examples, batch_length
        batch_length = len(batch)
        n_examples += batch_length
        return _call_converter(converter, batch, device)

    def evaluate(*args: Any, **kwargs: Any) -> None:
        (function or evaluator.get_target("main"))(*args, **kwargs)
        observation = chainer.reporter.get_current_reporter().observation
        for key, value in observation.items():
            if not isinstance(value, tuple):
                value = observation[key] = (value, batch_length)
            weights[key] += value[1]

    def weight_of(key: str) -> float:
        if not n_examples:
            raise ValueError(
                f"cannot tell over how many examples {key!r} was averaged: the evaluator's "
                "evaluate does not use its converter and eval_func. Make it use them, or use "
                "mean_over='ranks' or a GenericMultiNodeEvaluator"
            )
        return weights.get(key, n_examples)

    evaluator.converter, evaluator.eval_func = convert, evaluate
    try:
        yield weight_of
    finally:
        evaluator.converter, evaluator.eval_func = converter, function


def _to_number(value: Any) -> Any:
    array = np.asarray(chainer.backends.cuda.to_cpu(getattr(value, "array", value)))
    wide = array.astype(np.result_type(array, np.float64))
    return wide if wide.ndim else wide.item()
