"""The record that ranks agree on before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self


class Step(NamedTuple):
    """What a rank tells the others before a step; then, what at least one of them has told.

    Ranks agree on it in one small all-reduce, if possible the one that compares their models.

    Attributes
    ----------
    is_first : bool
        Whether the replicas have never been equal.
    has_new_parameters : bool
        Whether they have never been equal with these parameters.
    is_restored : bool
        Whether the rank has loaded a snapshot.
    is_incomplete : bool
        Whether the rank has another number of batches, or of local steps, than a step needs.
    ends_epoch : bool
        Whether an epoch ends, so that the step uses as many batches as there are.
    has_finished : bool
        Whether the rank has finished its epoch, and the others do not know yet.
    compares : bool
        Whether the rank has ended an epoch after which replicas are compared.
    averages_gradients, averages_changes : bool
        Whether the rank averages gradients, or the changes of parameters in local steps.
    has_begun, is_stale, needs_plan : bool
        Set by `OverlappedExchange`: whether an exchange began during backward, whether it is of
        no use, because gradients have changed since, and whether to exchange in another order.
    reluctance : int
        Before a step that may be a CUDA graph: a positive number, the larger, the less the rank
        is ready for it. Otherwise 0.
    settings : int
        Number that stands for the settings of the optimizer, which must be the same on all ranks;
        then, how far the numbers of the ranks are apart: 0 if they are equal.
    """

    is_first: bool = False
    has_new_parameters: bool = False
    is_restored: bool = False
    is_incomplete: bool = False
    ends_epoch: bool = False
    has_finished: bool = False
    compares: bool = False
    averages_gradients: bool = True
    averages_changes: bool = False
    has_begun: bool = False
    is_stale: bool = False
    needs_plan: bool = False
    reluctance: int = 0
    settings: int = 0

    def to_integers(self) -> list[int]:
        """Return integers whose maxima over the ranks `of_all` understands."""
        return [*self, -self.settings]

    @classmethod
    def of_all(cls, maxima: Sequence[int]) -> Self:
        """Return the record of what any rank tells; raise if ranks average different things."""
        *flags, reluctance, largest, negated = maxima
        step = cls(*map(bool, flags))
        step = step._replace(reluctance=reluctance, settings=largest + negated)
        if step.averages_gradients and step.averages_changes:
            raise ValueError(
                "some ranks average gradients, and others what local steps have changed, because "
                "they have taken different numbers of steps (optimizer.t). Load the same snapshot "
                "on all ranks"
            )
        if step.averages_gradients and step.reluctance:
            raise ValueError(
                "some ranks use CUDA graphs in this update, and others do not. On all ranks or on "
                "none, set CHAINER_CUDA_GRAPHS=1 or call optimizer.use_cuda_graphs(), pass a "
                "function to update(), and call setup()"
            )
        return step

    @property
    def pauses(self) -> bool:
        """Whether no gradients are averaged yet, as the ranks have to settle something first."""
        return (
            self.has_new_parameters
            or self.is_restored
            or self.is_incomplete
            or self.ends_epoch
            or self.has_finished
            or self.compares
            or self.settings != 0
        )
