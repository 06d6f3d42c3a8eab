"""What a resumed run cannot repeat bit for bit, because no snapshot holds it."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.iterators import ShuffleOrderSampler

from chainermn.extensions import generators
from chainermn.extensions.rank_states import (
    draws_elsewhere,
    inner_iterator,
    iterators_of,
    named_optimizers,
)
from chainermn.extensions.step_seed import StepSeed
from chainermn.optimizers.double_buffering_optimizer import DoubleBufferingOptimizer
from chainermn.resuming import unseeded_calls


def not_restored(trainer: chainer.training.Trainer) -> list[str]:
    """Return what a resumed run of this rank will not repeat, with remedies; often nothing."""
    found = []
    for name, iterator in iterators_of(trainer).items():
        iterator = inner_iterator(iterator)
        found += [f"iterator {name!r}: {fault}" for fault in _faults_of(iterator)]
    if unseeded_calls:
        calls = ", ".join(sorted(unseeded_calls))
        found.append(f"{calls} had no seed, so each run divides the data differently: pass seed=")
    if not generators.is_seeded():
        found.append("NumPy's generator was not seeded: call np.random.seed at the start")
    optimizers = named_optimizers(trainer).values()
    if any(isinstance(optimizer, DoubleBufferingOptimizer) for optimizer in optimizers):
        found.append("double_buffering drops the gradients in flight: one step is left out")
    cupy = chainer.backends.cuda.cupy
    on_gpu = any(optimizer.target.device.xp is cupy for optimizer in optimizers)
    if on_gpu and not _has_step_seed(trainer):
        found.append("the state of CuPy's generators cannot be read: use StepSeed for dropout")
    return found


def _faults_of(iterator: Any) -> list[str]:
    kind = type(iterator).__name__
    if type(iterator).serialize is chainer.dataset.Iterator.serialize:
        return [f"{kind} does not save its position, so a resumed run starts the epoch again"]
    if not draws_elsewhere(iterator):
        return []
    faults = []
    sampler = getattr(iterator, "order_sampler", None)
    # An iterator saves the generator of Chainer's sampler with the batch that it belongs to.
    is_chainers = (
        isinstance(sampler, ShuffleOrderSampler)
        and type(sampler).__call__ is ShuffleOrderSampler.__call__
    )
    if sampler is not None and not is_chainers and not callable(getattr(sampler, "order", None)):
        faults.append(
            f"{kind} calls {type(sampler).__name__} in advance, and what this remembers is not in "
            "the file: give it a method order(epoch), or use SerialIterator"
        )
    if places := generators.generators_of(iterator.dataset):
        faults.append(
            f"{kind} reads in advance, and the generator {places[0]!r} of its data set with it: "
            "make the numbers depend on the index of the example, or use SerialIterator"
        )
    return faults


def _has_step_seed(trainer: chainer.training.Trainer) -> bool:
    # Chainer has no public name for it.
    entries = trainer._extensions.values()
    return any(isinstance(entry.extension, StepSeed) for entry in entries)
