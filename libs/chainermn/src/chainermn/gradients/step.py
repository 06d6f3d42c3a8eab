"""The record that ranks agree on before a step."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """What a rank tells the others before a step; then, what at least one of them has told.

    Ranks agree on it in one small all-reduce, together with the parameters of their models.

    Attributes
    ----------
    has_new_parameters : bool
        Whether the replicas have never been equal with these parameters.
    is_restored : bool
        Whether the rank has loaded a snapshot.
    is_incomplete : bool
        Whether the gradients are of fewer batches than usual, or the changes of fewer local steps.
    ends_epoch : bool
        Whether an epoch ends, so that the step uses as many batches as there are.
    joins : bool
        Whether the rank has finished an epoch, and now joins the steps of the others.
    has_begun, is_stale, needs_plan : bool
        Whether an exchange began during backward, whether it is of no use, because gradients have
        changed since, and whether the order of the buckets should change. These do not pause.
    """

    has_new_parameters: bool = False
    is_restored: bool = False
    is_incomplete: bool = False
    ends_epoch: bool = False
    joins: bool = False
    has_begun: bool = False
    is_stale: bool = False
    needs_plan: bool = False

    @property
    def pauses(self) -> bool:
        """Whether no gradients are averaged yet, as the ranks have to settle something first."""
        return any(self[:5])
