"""Evaluate on all ranks, and combine the results on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from typing import Any

import chainer
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter
from chainer.training.extension import PRIORITY_WRITER, Extension

from chainermn import spans
from chainermn.agreement import check_root, run_together
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.extensions.separate_models import SeparateModels
from chainermn.optimizers.settling import settle

_WHERE = "GenericMultiNodeEvaluator"
_END = object()


def has_examples(iterator: Any) -> bool:
    """Tell whether an iterator may have examples; Chainer's fail with an empty data set."""
    dataset = getattr(iterator, "dataset", None)
    return not isinstance(dataset, Sized) or len(dataset) > 0


class GenericMultiNodeEvaluator(Extension):
    """Base class of evaluators whose result is not a mean, such as a BLEU score.

    Each rank calls `calc_local` for each batch of its own iterator. Then the root calls
    `aggregate` with the results of all ranks. Override one or both in a subclass.

    Parameters
    ----------
    comm : CommunicatorBase or None
        Communicator of the ranks; None for a single process without MPI.
    iterator : chainer.dataset.Iterator
        Iterator over the data of this rank, with ``repeat=False``. Ranks may have different
        numbers of batches, or none.
    target : callable
        Model, which `calc_local` calls.
    device : device specifier, optional
        Device to send batches to.
    converter : callable
        Function that converts a batch to arrays.
    root : int
        Rank that combines the results. All ranks raise ValueError if it is not a rank or differs
        between ranks.
    progress_hook : callable, optional
        Function that the root calls with each of its batches, after evaluating it.

    Examples
    --------
    Report the largest prediction of all ranks:

    >>> class Largest(chainermn.extensions.GenericMultiNodeEvaluator):
    ...     def calc_local(self, x, t):
    ...         return self._targets["main"](x).array.max().item()
    ...     def aggregate(self, results):
    ...         return max(results)
    >>> own = chainer.iterators.SerialIterator(
    ...     [(np.float32([comm.rank]), 0)], batch_size=1, repeat=False
    ... )
    >>> evaluator = Largest(comm, own, L.Linear(1, 1, initialW=10))
    >>> largest = evaluator(trainer)
    >>> if comm.rank == 0:
    ...     print(largest)
    10.0
    """

    trigger = 1, "epoch"
    default_name = "validation"
    priority = PRIORITY_WRITER
    name: str | None = None

    def __init__(
        self,
        comm: CommunicatorBase | None,
        iterator: chainer.dataset.Iterator,
        target: Callable[..., Any],
        device: Any = None,
        converter: Callable[..., Any] = concat_examples,
        root: int = 0,
        **kwargs: Any,
    ) -> None:
        (progress_hook,) = chainer.utils.argument.parse_kwargs(kwargs, ("progress_hook", None))
        if comm is not None:
            check_root(comm, root, _WHERE)
        self.comm = comm
        self.iterator = iterator
        self.converter = converter
        self.device = None if device is None else chainer.get_device(device)
        self.root = root
        self._targets = {"main": target}
        self._progress_hook = progress_hook
        self._separate_models = None if comm is None else SeparateModels(comm)

    @spans.spanned("evaluation")
    def __call__(self, trainer: chainer.training.Trainer) -> Any:
        """Evaluate. Every rank must call it. With local SGD, parameters are averaged first.

        On the root, it returns the result of `aggregate`; on other ranks, None. If `calc_local`
        or `aggregate` raises on any rank, every rank raises.
        """
        settle(trainer, self.comm)
        if self._separate_models is not None:
            updater = getattr(trainer, "updater", None)
            self._separate_models.warn(_WHERE, self._targets.values(), updater)
        results = self._results()
        with chainer.using_config("train", False):
            if self.comm is None:
                return self.aggregate([result for result in results if result is not None])
            gathered = self._gather_all(self.comm, results)
            is_root = self.comm.rank == self.root
            return run_together(
                self.comm, _WHERE, lambda: self.aggregate(gathered) if is_root else None
            )

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for a batch: an object that can be pickled, or None for no result.

        It receives the arrays of a batch, in test mode and without backward. By default, it calls
        ``target``.
        """
        return self._targets["main"](*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Combine the results of all batches of all ranks; by default, return the list.

        The list starts with the results of the first batch of each rank, in the order of the
        ranks. Those of the second batches follow, and so on.
        """
        return results

    def _gather_all(self, comm: CommunicatorBase, results: Iterator[Any]) -> list[Any]:
        everything: list[Any] = []
        while True:
            own = run_together(comm, _WHERE, lambda: next(results, _END))
            if not any(comm.allgather_obj(own is not _END)):
                return everything
            gathered = comm.gather_obj(None if own is _END else own, root=self.root)
            everything += [result for result in gathered or () if result is not None]

    def _results(self) -> Iterator[Any]:
        """Yield the result of each batch of this rank."""
        iterator = self.iterator
        if not has_examples(iterator):
            return
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        for batch in iterator:
            arrays = _call_converter(self.converter, batch, self.device)
            with chainer.no_backprop_mode():
                if isinstance(arrays, tuple):
                    result = self.calc_local(*arrays)
                elif isinstance(arrays, dict):
                    result = self.calc_local(**arrays)
                else:
                    result = self.calc_local(arrays)
            if self._progress_hook and (self.comm is None or self.comm.rank == self.root):
                self._progress_hook(batch)
            yield result
