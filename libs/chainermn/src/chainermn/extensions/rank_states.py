"""What each rank has of its own in a trainer: iterators, persistent values, random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import chainer
import numpy as np
from chainer.serializers import DictionarySerializer
from numpy.typing import NDArray

from chainermn.extensions import generators
from chainermn.gradients.persistents import persistents_of
from chainermn.iterators.prefetch import PrefetchIterator
from chainermn.optimizers.local_sgd import LocalSGDOptimizer

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_GENERATORS = "chainermn_generators/"


def iterators_of(trainer: chainer.training.Trainer) -> dict[str, Any]:
    """Return the iterators of a trainer by the names that its updater gives them."""
    return dict(getattr(trainer.updater, "_iterators", {}))  # Chainer has no public name for it


def inner_iterator(iterator: Any) -> Any:
    """Return the iterator that reads: that inside one of the library, or the iterator itself."""
    return getattr(iterator, "actual_iterator", None) or iterator


def named_optimizers(trainer: chainer.training.Trainer) -> dict[str, Any]:
    """Return the optimizers of a trainer by the names that its updater gives them."""
    return getattr(trainer.updater, "get_all_optimizers", dict[str, Any])()


def own_state(trainer: chainer.training.Trainer) -> dict[str, NDArray[Any]]:
    """Return what may differ between ranks whose trainers are replicas.

    Returns
    -------
    dict of str to array
        Positions and orders of iterators, persistent values of models, and states of optimizers
        with ``local``, with the keys that they have in a snapshot of the trainer; states of random
        generators.
    """
    own = DictionarySerializer()
    for name, iterator in iterators_of(trainer).items():
        iterator.serialize(own["updater"][f"iterator:{name}"])
    for name, optimizer in named_optimizers(trainer).items():
        if isinstance(optimizer, LocalSGDOptimizer):  # ranks take steps of their own
            optimizer.actual_optimizer.serialize(own["updater"][f"optimizer:{name}"])
        for persistent in persistents_of(optimizer.target):
            if isinstance(persistent.value, (*chainer.get_array_types(), int, float, np.generic)):
                own(f"updater/model:{name}{persistent.path}", persistent.value)
    # Training goes on while a writer's thread writes.
    copies = {key: np.array(value) for key, value in own.target.items()}
    return copies | generator_states(trainer)


def generator_states(trainer: chainer.training.Trainer) -> dict[str, NDArray[Any]]:
    """Return the states of this rank's random generators, part of `own_state`."""
    states = generators.states(_owners_of(trainer))
    return {f"{_GENERATORS}{place}": state for place, state in states.items()}


def restore_generators(trainer: chainer.training.Trainer, own: Arrays) -> None:
    """Restore the random generators of this rank from what `generator_states` returned."""
    saved = {key.removeprefix(_GENERATORS): own[key] for key in own if key.startswith(_GENERATORS)}
    generators.restore(_owners_of(trainer), saved)


def differences(states: Sequence[Arrays]) -> list[dict[str, NDArray[Any]]]:
    """Return what a snapshot of the first of several ranks has to hold in addition.

    Of the first rank, only its random generators; of others, what differs from the first.
    """
    first = {key: value for key, value in states[0].items() if key.startswith(_GENERATORS)}
    others = (
        {
            key: value
            for key, value in state.items()
            if key not in states[0] or not _is_same(value, states[0][key])
        }
        for state in states[1:]
    )
    return [first, *others]


def draws_elsewhere(iterator: Any) -> bool:
    """Tell whether threads or processes of an iterator read its examples in advance."""
    chainers = chainer.iterators.MultiprocessIterator, chainer.iterators.MultithreadIterator
    return isinstance(iterator, (*chainers, PrefetchIterator))


def _is_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and one.tobytes() == other.tobytes()  # NaN too


def _owners_of(trainer: chainer.training.Trainer) -> dict[str, object]:
    """Return what may have random generators: samplers, and data sets that are read in steps."""
    owners: dict[str, object] = {}
    for name, iterator in iterators_of(trainer).items():
        iterator = inner_iterator(iterator)
        owners[f"{name}.order_sampler"] = getattr(iterator, "order_sampler", None)
        if not draws_elsewhere(iterator):
            owners[f"{name}.dataset"] = getattr(iterator, "dataset", None)
    return owners
