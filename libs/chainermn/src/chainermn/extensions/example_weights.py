"""Weight the values that a batch reports by the number of its examples."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import chainer
from chainer.dataset.convert import _call_converter

if TYPE_CHECKING:
    from chainer.training.extensions import Evaluator


class ExampleWeights:
    """Context in which an evaluator's mean over batches becomes a mean over examples.

    Chainer's summaries accept a pair of a value and its weight. The weight of a value that the
    evaluator's function reports is the length of the batch.

    Parameters
    ----------
    evaluator : chainer.training.extensions.Evaluator
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._examples = 0
        self._weights: Counter[str] = Counter()
        self._batch_length = 0

    def of(self, key: str) -> float:
        """Return the number of examples that the mean for ``key`` was taken over.

        Raises
        ------
        ValueError
            If no batch went through the evaluator's converter and function.
        """
        if not self._examples:
            raise ValueError(
                f"cannot tell over how many examples {key!r} was averaged: the evaluator's "
                "evaluate does not use its converter and eval_func. Make it use them, or use "
                "mean_over='ranks' or a GenericMultiNodeEvaluator"
            )
        return self._weights.get(key, self._examples)

    def __enter__(self) -> Self:
        evaluator = self._evaluator
        self._converter, self._function = evaluator.converter, evaluator.eval_func
        evaluator.converter = chainer.dataset.converter()(self._convert)
        evaluator.eval_func = self._evaluate
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._evaluator.converter = self._converter
        self._evaluator.eval_func = self._function

    def _convert(self, batch: Any, device: Any) -> Any:
        self._batch_length = len(batch)
        self._examples += self._batch_length
        return _call_converter(self._converter, batch, device)

    def _evaluate(self, *args: Any, **kwargs: Any) -> None:
        function = self._function or self._evaluator.get_target("main")
        function(*args, **kwargs)
        observation = chainer.reporter.get_current_reporter().observation
        for key, value in observation.items():
            if not isinstance(value, tuple):
                value = observation[key] = (value, self._batch_length)
            self._weights[key] += value[1]
