"""Compare the replicas of all ranks now and then, and say where and since when they differ."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import chainer
import numpy as np

from chainermn.optimizers.parts import describe, digest_of

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.gradients.persistents import Persistent

OnDifference = Literal["raise", "warn", "ignore"]

_SHOWN = 3  # number of parts to name, at most
# Largest relative differences that many steps of rounding explain, by the character of the dtype.
_ROUNDING = {"e": 4e-3, "f": 1e-5, "d": 2e-14}
_BLAS = "processors for which BLAS rounds differently (set OPENBLAS_CORETYPE=Haswell on all hosts)"
_CAUSES = (
    "a parameter or weights written on some ranks only (call comm.bcast_data(model, "
    "persistent=True) afterwards), a change in place that depends on the rank, a layer or a hook "
    "on some ranks only, a GPU kernel that is not deterministic (set "
    f"chainer.config.cudnn_deterministic = True), {_BLAS}"
)


class Difference(NamedTuple):
    """A part in which the replicas of some ranks differ from those of others.

    Attributes
    ----------
    name : str
        Name of the part.
    ranks : tuple of int
        Ranks that differ from rank 0; only 0 if it is rank 0 that differs from all others.
    kinds : tuple of (str, str)
        Dtypes and shapes on rank 0 and on the first rank that differs from it; for values other
        than arrays, the values.
    largest, relative : float
        Largest absolute difference, and what this is of the largest magnitude on rank 0; infinite
        for NaN on some ranks only, and for everything except arrays of one shape and dtype.
    may_be_rounding : bool
        Whether the difference is so small that processors may have rounded differently.
    """

    name: str
    ranks: tuple[int, ...]
    kinds: tuple[str, str]
    largest: float = math.inf
    relative: float = math.inf
    may_be_rounding: bool = False

    def __str__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        others = "all others" if self.ranks == (0,) else ranks
        one, other = self.kinds
        if one != other:
            return f"{self.name} is {one} on rank 0, but {other} on {others}"
        size = f"{self.largest:.3g} ({self.relative:.2g} times its largest value)"
        return f"{self.name} differs between rank 0 and {others} by up to {size}"


class Comparison:
    """When the replicas of an optimizer are compared, and what happens if they differ.

    Parameters
    ----------
    communicator : CommunicatorBase
        Communicator of the ranks.
    every : int
        Number of epochs between comparisons; 0 for none at all.
    on_difference : {'raise', 'warn', 'ignore'}
        What to do; ``'ignore'`` compares nothing.

    Attributes
    ----------
    is_due : bool
        Whether this rank has ended such an epoch since the last comparison.
    """

    def __init__(
        self,
        communicator: CommunicatorBase,
        every: int = 1,
        on_difference: OnDifference = "raise",
    ) -> None:
        self._communicator = communicator
        self.every = every
        self.on_difference = on_difference
        self.is_due = False
        self._equal_at = 0
        self._compared_in: tuple[int | None, int] | None = None
        self._persistents: Sequence[Persistent] = ()
        self._persistents_in: int | None = None
        self._has_warned = False

    @property
    def is_on(self) -> bool:
        """Whether replicas are compared at all."""
        return self.every > 0 and self.on_difference != "ignore" and self._communicator.size > 1

    @property
    def settings(self) -> str:
        """Text that ranks compare; empty for the default."""
        if (self.every, self.on_difference) == (1, "raise"):
            return ""
        return f", compare_every={self.every}, on_difference={self.on_difference!r}"

    def with_same_settings(self) -> Comparison:
        """Return another one, for another optimizer."""
        return Comparison(self._communicator, self.every, self.on_difference)

    def end_epoch(self, epoch: int) -> None:
        """Note that this rank has finished this number of epochs."""
        self.is_due |= self.is_on and epoch % self.every == 0

    def note_equal(self, t: int) -> None:
        """Note that all replicas are equal after ``t`` steps."""
        self._equal_at, self.is_due = t, False

    def note_equal_persistents(self, persistents: Sequence[Persistent], iteration: int) -> None:
        """Note that persistent values must be equal on all ranks until an iteration ends."""
        earlier = self._persistents if iteration == self._persistents_in else ()
        self._persistents, self._persistents_in = [*earlier, *persistents], iteration

    def compare(
        self, parts: Mapping[str, Any] | None, t: int, iteration: int | None = None
    ) -> None:
        """Compare the replicas, unless this was done in the same iteration. Collective.

        Parameters
        ----------
        parts : mapping of str to object, or None
            Values, by name, that must be equal on all ranks after ``t`` steps. Nothing is
            compared if they are None on any rank.
        t : int
            Number of steps that the optimizer has taken.
        iteration : int, optional
            Iteration of the trainer. Without it, replicas are always compared.

        Raises
        ------
        ValueError
            On every rank, if replicas differ by more than rounding and ``on_difference`` is
            ``'raise'``.
        """
        is_done = iteration is not None and (iteration, t) == self._compared_in
        if parts is not None and iteration is not None and iteration == self._persistents_in:
            parts = {**parts, **{each.path: each.value for each in self._persistents}}
        digest = None if parts is None or is_done else digest_of(parts)
        digests = set(self._communicator.allgather_obj(digest))
        if parts is None or None in digests:
            return
        self._compared_in, self.is_due = (iteration, t), False
        if len(digests) == 1:
            self._equal_at = t
            return
        differences = find_differences(self._communicator, parts)
        since, now = self._communicator.bcast_obj((min(self._equal_at + 1, t), t))
        if all(difference.may_be_rounding for difference in differences):
            if not self._has_warned:
                self._warn(
                    f"the replicas differ by rounding: {_listed(differences)}. The likely cause "
                    f"is {_BLAS}. Training continues, and only larger differences are reported"
                )
            self._has_warned = True
        else:
            problem = (
                f"the replicas are no longer equal: {_listed(differences)}; since iteration "
                f"{since} at the earliest (optimizer.t is {now} now). Likely causes: {_CAUSES}"
            )
            if self.on_difference == "raise":
                raise ValueError(problem)
            self._warn(problem)

    def _warn(self, problem: str) -> None:
        if self._communicator.rank == 0:
            warnings.warn(problem, stacklevel=2)


def find_differences(
    communicator: CommunicatorBase, values: Mapping[str, Any]
) -> list[Difference]:
    """Return the values that are not equal on all ranks, bit for bit. Collective."""
    own = {name: (_kind(values[name]), of_part) for name, of_part in describe(values).items()}
    first = communicator.bcast_obj(own)
    names = {**first, **own}
    different = {name: own.get(name) for name in names if own.get(name) != first.get(name)}
    by_rank = communicator.allgather_obj(different)
    found = []
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        others = {rank: of_rank[name] for rank, of_rank in enumerate(by_rank) if name in of_rank}
        ranks = tuple(others)
        if 2 < len(by_rank) == len(others) + 1 and len(set(others.values())) == 1:
            ranks = (0,)
        found_kinds = [
            each[0] if each else "missing" for each in (first.get(name), *others.values())
        ]
        other = next((kind for kind in found_kinds if kind != found_kinds[0]), found_kinds[0])
        difference = Difference(name, ranks, (found_kinds[0], other))
        if other == found_kinds[0] and _is_array(values[name]):
            difference = _measured(communicator, values[name], difference)
        found.append(difference)
    return found


def _listed(differences: Sequence[Difference]) -> str:
    shown = "; ".join(map(str, differences[:_SHOWN]))
    n_more = len(differences) - _SHOWN
    return shown + (f"; and {n_more} more part{'s' * (n_more > 1)}" if n_more > 0 else "")


def _measured(communicator: CommunicatorBase, own: Any, difference: Difference) -> Difference:
    """Complete the difference of an array that has the same shape on all ranks. Collective."""
    device = chainer.backend.get_device_from_array(own)
    first = device.send(communicator.bcast(own))
    with chainer.using_device(device):
        measured = _distance(device.xp, own, first)
    largest, relative = map(max, zip(*communicator.allgather_obj(measured), strict=True))
    limit = _ROUNDING.get(own.real.dtype.char, 0.0)
    return difference._replace(
        largest=largest, relative=relative, may_be_rounding=relative < limit
    )


def _distance(xp: Any, own: Any, first: Any) -> tuple[float, float]:
    """Return the largest difference of two arrays, absolute and relative to the second."""
    wide = np.result_type(own.dtype, np.float64)
    own, first = own.astype(wide), first.astype(wide)
    with np.errstate(all="ignore"):
        distance = xp.where(
            (own == first) | ((own != own) & (first != first)), 0, abs(own - first)
        )
        largest = float(xp.where(xp.isnan(distance), math.inf, distance).max())
        magnitude = float(xp.where(xp.isfinite(first), abs(first), 0).max())
    return largest, largest / magnitude if magnitude else (math.inf if largest else 0.0)


def _is_array(value: Any) -> bool:
    return isinstance(value, chainer.get_array_types())


def _kind(value: Any) -> str:
    """Return dtype and shape of an array, or the value itself."""
    return f"{value.dtype.name}{list(value.shape)}" if _is_array(value) else repr(value)
