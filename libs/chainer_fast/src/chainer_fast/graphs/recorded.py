"""One recorded step: forward, backward, exchange and update as a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer
import numpy as np

from chainer_fast.channels_last.fusing import Fused, FusionPlan
from chainer_fast.graphs.circumstances import Attribute, Circumstances, pre_hooks
from chainer_fast.graphs.drawing import Draws
from chainer_fast.graphs.generators import generators_of, is_in, set_state, state_of
from chainer_fast.graphs.inputs import Inputs, NotRecordable
from chainer_fast.graphs.numbers import Numbers
from chainer_fast.graphs.outputs import Outputs
from chainer_fast.graphs.recorder import Recorder
from chainer_fast.graphs.scaling import Scaling
from chainer_fast.graphs.steps import Steps
from chainer_fast.updates import RecordedSteps, is_weight_decay, look

# Bytes for the numbers and the rows of tables of a parameter: in half precision, Adam takes part
# in five calls of kernels, with 8 numbers and 20 addresses or sizes.
_BYTES_OF_PARAMETER = 1024
_BYTES_OF_ALL = 4096


class RecordedStep:
    """A step that a graph does.

    Parameters
    ----------
    steps
        Steps of the optimizer.
    lossfun, args, kwds
        What the script calls ``optimizer.update`` with.
    recorder
        What records.
    scaling
        Loss scale on the GPU.
    draws
        Random numbers of steps.
    circumstances
        Links, and their attributes that steps replace.
    fusion_plan
        What the step fuses.
    """

    def __init__(
        self,
        steps: Steps,
        lossfun: Callable[..., Any],
        args: Sequence[Any],
        kwds: Mapping[str, Any],
        recorder: Recorder,
        scaling: Scaling,
        draws: Draws,
        circumstances: Circumstances,
        fusion_plan: FusionPlan,
    ) -> None:
        self.fusion_plan = fusion_plan
        #: Number of batch normalizations that are computed with ReLU.
        self.n_fused = 0
        self._steps, self._lossfun = steps, lossfun
        self._recorder, self._scaling, self._draws = recorder, scaling, draws
        self._optimizer = optimizer = steps.optimizer
        xp = self._xp = chainer.backends.cuda.cupy
        self._parameters = list(optimizer.target.params())
        n_bytes = _BYTES_OF_ALL + _BYTES_OF_PARAMETER * len(self._parameters)
        self._numbers = Numbers(xp, n_bytes, scaling.found)
        self._inputs = Inputs(xp, chainer.Variable, (tuple(args), dict(kwds)))
        self._links = circumstances.links
        self._outputs = Outputs(self._links, set(circumstances.results), xp.ndarray)
        self._graph: Any = None
        self._update: RecordedSteps
        #: Number of steps in which its results are still compared with those of an eager step.
        self.n_checks = 2
        #: Whether it has not been launched in place of an eager step.
        self.is_new = True

    # ---- recording ----

    def rehearse(self, args: Sequence[Any], kwds: Mapping[str, Any]) -> str | None:
        """Enqueue the step without recording it, and without an update.

        This compiles and loads its kernels, and changes only gradients and persistent values.

        Returns
        -------
        str or None
            Why the step cannot be recorded, although all of it has been enqueued.
        """
        self._rehearsed = tuple(args), dict(kwds)
        self._inputs.write(self._rehearsed)
        self._scaling.found[...] = True  # skips the update
        own = {id(each) for each in self._parameters}
        others = [p for link in self._links for p in link.params(False) if id(p) not in own]
        gradients = [each.grad_var for each in others]
        generators = generators_of(self._links, self._lossfun)
        before = [state_of(each) for each in generators]
        objections: list[str] = []
        try:
            with self._recorder.beside():
                self._numbers.begin()
                self._enqueue()
        except NotRecordable as error:
            objections.append(str(error))
        except (AttributeError, TypeError) as error:
            if not (names := self._outputs.hidden):
                raise
            raise type(error)(
                f"{error}: perhaps because it reads what it kept in the step before ({names})"
            ) from error
        finally:
            pairs = list(zip(generators, before, strict=True))
            has_drawn = [not is_in(generator, old) for generator, old in pairs]
            for generator, old in pairs:
                set_state(generator, old)
        if any(has_drawn):
            objections.append("it draws random numbers on the host")
        for parameter, gradient in zip(others, gradients, strict=True):
            if parameter.grad_var is not gradient:
                parameter.grad_var = gradient
                objections.append(
                    f"the loss depends on parameter {parameter.name}, which the optimizer does "
                    "not update"
                )
        return next(iter(objections), None)

    def record(self) -> None:
        """Record the step, after a rehearsal that is done. Nothing is done yet."""
        if not self._inputs.are(self._rehearsed):
            raise NotRecordable("it changes an argument of the loss function in place")
        self._numbers.begin()
        self._graph = self._recorder.record(self._enqueue)
        self._gradients = [(each, each.grad_var) for each in self._parameters]
        self._outputs.forget_functions()
        self.uses_t = self._update.depends_on_t()

    def _enqueue(self) -> None:
        before = [parameter._loss_scale for parameter in self._parameters]
        try:
            self._enqueue_all()
        finally:  # an eager step expects numbers
            for parameter, loss_scale in zip(self._parameters, before, strict=True):
                parameter._loss_scale = loss_scale

    def _enqueue_all(self) -> None:
        optimizer, scaling = self._optimizer, self._scaling
        args, kwds = self._inputs.recorded
        scale = None if vars(optimizer).get("_loss_scale") is None else scaling.scale
        with self._draws.step(), self._outputs.taken():
            fused = Fused(self.fusion_plan, leaves_out=True)
            with fused.step():
                self._steps.gradients(self._lossfun, args, kwds, scale)
            self.n_fused = fused.n_fused
            self._n_draws = self._draws.n_calls
            optimizer.reallocate_cleared_grads()
            if optimizer._loss_scaling_is_dynamic:
                gradients = [each.grad for each in self._parameters]
                look(gradients, scaling.found, chainer.backends.cuda, self._numbers)
            hooks = pre_hooks(optimizer)
            decays = [hook for hook in hooks if is_weight_decay(hook)]
            try:
                self._update = RecordedSteps(
                    self._parameters, decays, chainer, self._numbers, scale
                )
            except ValueError as error:
                raise NotRecordable(str(error)) from error
            for hook in hooks:
                if hook in decays:
                    self._update.enqueue_decay(hook)
                else:
                    optimizer.call_hook(hook)
            self._update.enqueue()
            optimizer.call_hooks("post")
            if optimizer._loss_scaling_is_dynamic:
                scaling.change(optimizer)

    # ---- a step ----

    def prepare(self, args: Sequence[Any], kwds: Mapping[str, Any], key: Sequence[int]) -> None:
        """Write what differs from the last step: inputs, numbers, and the key of random draws.

        Counts the step, except in ``optimizer.t``.
        """
        self._inputs.write((tuple(args), dict(kwds)))
        if self._n_draws:
            self._draws.key[...] = self._xp.asarray(np.array(key, np.uint64))
        self._update.count(1)
        self._numbers.set(self._update.numbers(self.uses_t))
        self._numbers.write()

    def launch(self) -> None:
        """Launch the graph."""
        self._recorder.launch(self._graph)

    @property
    def rules(self) -> list[Any]:
        """Update rules that count the step."""
        return self._update.rules

    def hand_out(self) -> list[Attribute]:
        """Give the script the results of the step; return which attributes got some."""
        for parameter, gradient in self._gradients:
            if parameter._grad_var is not gradient:
                parameter.grad_var = gradient
        return self._outputs.hand_out()

    def uncount(self) -> None:
        """Take back that `prepare` has counted a step."""
        self._update.count(-1)
