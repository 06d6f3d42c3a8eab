"""Local SGD: each rank takes several steps of its own, then parameters are averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import chainer
import numpy as np

from chainermn.arguments import check_number
from chainermn.gradients.parameters import named_parameters
from chainermn.gradients.step import Step
from chainermn.optimizers.accumulated import Anchors
from chainermn.optimizers.accumulation import check_equal_counts
from chainermn.optimizers.comparison import Comparison
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers.parts import is_float_array
from chainermn.optimizers.replicas import initialize_states
from chainermn.optimizers.settings import StepSettings

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.gradients.compressor import Compressor

States = Literal["keep", "average", "reset"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Settings of local SGD, for the argument ``local`` of `create_multi_node_optimizer`.

    Each rank takes ``period`` steps on its own gradients, then the parameters of all ranks are
    averaged. So ranks communicate only once in ``period`` steps. With ``start_iteration``, the
    first steps use averaged gradients (post-local SGD).

    Parameters
    ----------
    period : int
        Number of steps of each rank between two averages.
    start_iteration : int
        Number of steps on averaged gradients before local SGD starts.
    states : {'keep', 'average', 'reset'}
        Treatment of the optimizer's state, such as momentum, when parameters are averaged: each
        rank keeps its own, the states are averaged too, or they start from zero.

    Raises
    ------
    ValueError
        If an argument is invalid.

    Examples
    --------
    >>> optimizer = chainermn.create_multi_node_optimizer(
    ...     chainer.optimizers.SGD(), comm, local=chainermn.optimizers.LocalSGD(period=16)
    ... )

    References
    ----------
    Stich: Local SGD converges fast and communicates little, arXiv:1805.09767, 2019.

    Lin et al.: Don't use large mini-batches, use local SGD, 2020.
    """

    period: int = 8
    start_iteration: int = 0
    states: States = "keep"

    def __post_init__(self) -> None:
        check_number("LocalSGD: period", self.period, 1)
        check_number("LocalSGD: start_iteration", self.start_iteration, 0)
        if self.states not in get_args(States):
            raise ValueError(
                f"LocalSGD: states must be 'keep', 'average' or 'reset', got {self.states!r}"
            )


class LocalSGDOptimizer(MultiNodeOptimizer):
    """Optimizer that `create_multi_node_optimizer` returns for local SGD; see `LocalSGD`.

    Ranks exchange the changes of parameters since the last average. These are sent like
    gradients, so they can be compressed, or sent in 16 bits.

    Examples
    --------
    >>> local = chainermn.optimizers.LocalSGD(period=2)
    >>> optimizer = chainer.optimizers.SGD()
    >>> optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, local=local)
    >>> optimizer = optimizer.setup(model)
    >>> for _ in range(4):  # gives all ranks equal parameters, then takes three steps
    ...     optimizer.update(model, np.ones((4, 2), np.float32), np.zeros(4, np.int32))
    >>> optimizer.average()  # after the second step, they were averaged already
    """

    local: LocalSGD
    _accumulated: Anchors

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        local: LocalSGD,
        compressor: Compressor | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        super().__init__(
            actual_optimizer,
            communicator,
            zero_fill,
            compressor=compressor,
            comparison=comparison,
        )
        vars(self).update(
            local=local,
            _accumulated=Anchors(),
            # Gradients overflow on one rank only, and change its loss scale.
            _step_settings=StepSettings(with_loss_scale=False),
        )

    def _update(self, lossfun: Callable[..., Any] | None, *args: Any, **kwds: Any) -> None:
        """Take a step on this rank's gradients; after ``period`` steps, average parameters.

        Before ``start_iteration``, take that of `MultiNodeOptimizer`.
        """
        self._accumulated.take_over(self.actual_optimizer)
        if not self._is_local or self.actual_optimizer.target is None:
            super()._update(lossfun, *args, **kwds)
            return
        if lossfun is not None:
            self._compute_gradients(lossfun, args, kwds, self.actual_optimizer._loss_scale)
        if not self._replicas.were_equal(self.actual_optimizer.target) and not self._begin():
            return
        if self.actual_optimizer.t == self.local.start_iteration:
            self._begin_local_steps()
        anchors = self._accumulated.arrays
        if not anchors:
            anchors.update({name: p.array.copy() for name, p in self._named_parameters()})
        self._take_step()
        self._n_updates += 1
        if self._n_updates >= self.local.period:
            self.average()

    def new_epoch(self, auto: bool = False) -> None:
        """Finish an epoch: average parameters, so that evaluators and snapshots use the averages.

        Updaters call this. Every rank must call it.
        """
        self._step_settings.forget()
        self.settle()
        self.actual_optimizer.new_epoch(auto)
        self.comparison.end_epoch(self.actual_optimizer.epoch)

    def settle(self) -> None:
        """Average parameters, unless this was done after the last step. Collective."""
        if self._is_local and self._replicas.were_equal(self.actual_optimizer.target):
            self.average()

    def average(self) -> None:
        """Average the parameters of all ranks now. Every rank must call it.

        Raises
        ------
        ValueError
            On every rank, if ranks have taken different numbers of steps since the last average.
        """
        n_updates, restored = self._n_updates, self._restored
        self._n_updates, self._restored = 0, None
        self._accumulated.take_over(self.actual_optimizer)
        step = self._state(restored)._replace(
            is_incomplete=n_updates != self.local.period,
            compares=self.comparison.is_due,
            averages_gradients=False,
            averages_changes=True,
        )
        step = self._average_changes(step)
        if not step.pauses:
            return
        if step.has_new_parameters:
            self._agree_on_settings()
        if step.is_restored:
            self._after_restoring(restored)
        if self._make_equal(step, restored):
            return
        if step.is_incomplete:
            problem = "ranks have taken different numbers of steps since parameters were averaged"
            check_equal_counts(self.communicator, n_updates, f"{self.local}: {problem}")
        if n_updates:
            self._average_changes(Step(averages_gradients=False, averages_changes=True))
        if step.compares:
            self.compare_replicas()

    @property
    def _is_local(self) -> bool:
        return self.actual_optimizer.t >= self.local.start_iteration

    def _begin_local_steps(self) -> None:
        """Prepare to exchange parameters instead of gradients from now on."""
        if any(parameter.dtype == np.float16 for _, parameter in self._named_parameters()):
            raise ValueError(
                f"{self.local} does not average parameters in float16, because rounding would "
                "lose small steps. Use float32 for the model"
            )
        if self._compressor is not None:
            self._compressor.load(self._compressor.n_exchanges, {})

    def _begin(self) -> bool:
        """Make the replicas equal, unless a snapshot has done so; tell whether it has."""
        restored, self._restored = self._restored, None
        # If another rank is not local yet, it begins a step on averaged gradients.
        step = self._average(self._state(restored))
        self._agree_on_settings()
        if step.is_restored:
            self._after_restoring(restored)
        return not self._make_equal(step, restored)

    def _average_changes(self, step: Step) -> Step:
        """Average parameters, unless the step pauses on any rank; return what any rank says."""
        parameters, anchors = self._named_parameters(), self._accumulated.arrays
        for name, parameter in parameters:
            parameter.cleargrad()
            if name in anchors:
                parameter.grad = parameter.array - anchors[name]
                parameter._loss_scale = None
        step = self._average(step)
        if step.pauses:
            return step
        for name, parameter in parameters:
            anchor = anchors[name]
            anchor += parameter.grad
            parameter.array[...] = anchor
            parameter.cleargrad()
        if self.local.states == "average":
            self._average_states()
        elif self.local.states == "reset":
            self._reset_states()
        return step

    def _average_states(self) -> None:
        states = [rule.state for rule in self._rules() if rule.state]
        places = [
            (state, key) for state in states for key in sorted(state) if is_float_array(state[key])
        ]
        means = self.communicator.allreduce([state[key] for state, key in places], "mean")
        for (state, key), mean in zip(places, means, strict=True):
            state[key][...] = mean

    def _reset_states(self) -> None:
        for rule in self._rules():
            rule._state = None
            rule.t = 0
        initialize_states(self.actual_optimizer.target)

    def _rules(self) -> list[Any]:
        return [p.update_rule for _, p in self._named_parameters() if p.update_rule is not None]

    def _named_parameters(self) -> list[tuple[str, chainer.Parameter]]:
        """Return the initialized parameters with their names, each once."""
        pairs = named_parameters(self.actual_optimizer.target)
        once = {parameter.node: (name, parameter) for name, parameter in pairs}
        return [(name, p) for name, p in once.values() if p.array is not None]

    @property
    def has_pending(self) -> bool:
        """Whether the settings may leave something to send later."""
        return True

    def _forget(self, n_exchanges: int) -> None:
        super()._forget(n_exchanges)
        self._accumulated.arrays, self._n_updates = {}, 0

    def _parts_to_resume(self) -> dict[str, Any]:
        found, anchors = super()._parts_to_resume(), self._accumulated.arrays
        return {**found, **anchors} if self._is_local and anchors else found

    def _synchronize(self, everything: bool) -> None:
        self._accumulated.arrays, self._n_updates = {}, 0
        super()._synchronize(everything)

    def _equal_parts(self) -> dict[str, Any] | None:
        return None if self._n_updates else super()._equal_parts()

    def _equal_states(self) -> dict[str, Any]:
        found = super()._equal_states()
        if not self._is_local:
            return found
        # A rank skips the step if its own gradients overflow, so counts may differ.
        are_equal = self.local.states != "keep"
        return {key: one for key, one in found.items() if are_equal and is_float_array(one)}

    def _exchange_of_recorded_steps(self) -> str:
        return f"local={self.local!r}"

    def _further_settings(self) -> str:
        return f"{super()._further_settings()}, local={self.local!r}"

    def _twin(self, actual_optimizer: chainer.Optimizer, compressor: Compressor | None) -> Self:
        return type(self)(
            actual_optimizer, self.communicator, self.zero_fill, self.local, compressor
        )
