"""When an optimizer records its steps, launches them, or goes on without graphs.

The first steps are eager: they initialize parameters, choose kernels and fill caches. Then a step
is recorded for each combination of shapes and settings, and compared with eager steps from the
same state, before graphs are launched in their place.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainer_fast.channels_last.fusing import Fused, FusionPlan, Observed
from chainer_fast.channels_last.layout import is_wanted
from chainer_fast.graphs import circumstances
from chainer_fast.graphs.circumstances import Circumstances, of_loss_function
from chainer_fast.graphs.drawing import Draws
from chainer_fast.graphs.inputs import NotRecordable, signature
from chainer_fast.graphs.outputs import noting_results
from chainer_fast.graphs.recorded import RecordedStep
from chainer_fast.graphs.recorder import Recorder
from chainer_fast.graphs.scaling import Scaling
from chainer_fast.graphs.state import State
from chainer_fast.graphs.steps import CHECK, EAGER, GIVE_UP, RECORD, REPLAY, Steps

#: Number of eager steps before the first recording.
N_FIRST = 3
#: Most graphs at a time; another one takes the place of the one used least recently.
MOST_GRAPHS = 4
#: Most steps without launching a graph, and most combinations of shapes and settings to remember.
MOST_EAGER, MOST_SEEN = 64, 256
#: Fewest launches of graphs per recording, after some time.
FEWEST_LAUNCHES = 8
#: Most steps in a row that find other arrays than the step before.
MOST_BEGUN = 8
#: Number of launches after which the host looks whether the GPU has skipped steps.
LAUNCHES_BETWEEN_LOOKS = 100

_OWN = Path(__file__).resolve().parents[1]
_PARTS = "the loss function", "the arguments", "settings or attributes of links", "the exchange"


class _Plan(NamedTuple):
    wish: int
    key: Hashable = None
    reason: str | None = None


class CudaGraphs:
    """The CUDA graphs of one optimizer.

    Attributes
    ----------
    n_eager, n_recorded, n_launched : int
        Number of steps without graphs, of recordings, and of steps by a graph.
    n_fused : int
        Number of batch normalizations that the last recorded step computes with ReLU.
    """

    def __init__(self) -> None:
        self.n_eager = self.n_recorded = self.n_launched = self.n_fused = 0
        self._is_over = self._has_asked = self._is_on_gpu = False
        #: Steps that the GPU may have skipped, unknown to the host.
        self._ahead: RecordedStep | None = None
        self._last_key: tuple[Hashable, ...] = (None,) * len(_PARTS)
        self._circumstances = Circumstances()
        self._graphs: dict[Hashable, RecordedStep] = {}
        self._seen: dict[Hashable, int] = {}
        self._never: set[Hashable] = set()
        #: What recordings may fuse, as the last eager steps have shown.
        self._fusion_plans: dict[Hashable, FusionPlan] = {}
        self._device: Any = None
        self._n_since_launch = self._n_begun = 0
        self._shared: _Shared | None = None

    def __deepcopy__(self, memo: Any) -> CudaGraphs:
        return CudaGraphs()

    def __reduce__(self) -> Any:
        return CudaGraphs, ()

    @property
    def are_on(self) -> bool:
        """Whether steps may be recorded; False once that was given up."""
        return not self._is_over

    @property
    def n_bytes(self) -> int:
        """Bytes of GPU memory that graphs take."""
        return 0 if self._shared is None else self._shared.recorder.n_bytes

    def update(
        self,
        steps: Steps,
        lossfun: Callable[..., Any],
        args: Sequence[Any],
        kwds: Mapping[str, Any],
    ) -> None:
        """Take a step. On several ranks, collective."""
        call = _Call(steps, lossfun, args, kwds)
        if self._is_over:
            call.eager()
            return
        planned = _attempt(lambda: self._plan(call))
        plan = planned.result or _Plan(GIVE_UP, reason=planned.problem)
        with chainer.using_device(self._device) if self._is_on_gpu else nullcontext():
            self._do(plan, call)

    def _do(self, plan: _Plan, call: _Call) -> None:
        """Do what all ranks can do."""
        steps = call.steps
        agreed = steps.agree(plan.wish)
        if agreed == GIVE_UP:
            self._end(steps, steps.reasons(plan.reason))
            call.eager()
        elif agreed == RECORD:
            self._record(call, plan.key)
        elif agreed == CHECK:
            self._check(call, plan.key)
        elif agreed == REPLAY:
            self._launch(call, self._graphs[plan.key])
        else:
            self._eager(call, plan.key)

    def settle(self, optimizer: Any) -> None:
        """Give the optimizer what the GPU knows better: the loss scale, and skipped steps.

        Waits for the GPU if it has changed them.
        """
        if self._ahead is not None and self._shared is not None:
            rules, self._ahead = self._ahead.rules, None
            for each in (optimizer, *rules):
                vars(each).pop("_ahead", None)
            n_skipped = self._shared.scaling.settle(optimizer)
            for rule in rules:
                vars(rule)["t"] -= n_skipped

    # ---- what to do ----

    def _plan(self, call: _Call) -> _Plan:
        """Return what this rank wishes; raise NotRecordable if it must give up."""
        optimizer, array = call.steps.optimizer, chainer.backends.cuda.ndarray
        known = self._circumstances.arrays
        function, others = of_loss_function(call.lossfun)
        if self._circumstances.look(optimizer, others):
            self._n_begun = 0
        else:
            self._check_replaced(known)
            self._begin()
        if not self._has_asked:
            self._has_asked = True
            if reason := call.steps.why_not():
                return _Plan(GIVE_UP, reason=reason)
        if not self._is_on_gpu:
            arrays = [each.array for each in optimizer.target.params()]
            if not arrays or any(each is None for each in arrays):
                return _Plan(EAGER)
            if not all(isinstance(each, array) for each in arrays):
                return _Plan(GIVE_UP, reason="the model is not on a GPU")
            self._is_on_gpu = True
            self._device = next(optimizer.target.params()).device
        if reason := self._circumstances.why_not:
            return _Plan(GIVE_UP, reason=reason)
        if circumstances.is_looked_at():
            return _Plan(EAGER)
        arguments = signature((tuple(call.args), dict(call.kwds)), array)
        key = function, arguments, self._circumstances.number, call.steps.key()
        plan = self._plan_for(key)
        self._last_key = key
        return plan

    def _plan_for(self, key: tuple[Hashable, ...]) -> _Plan:
        recorded = self._graphs.get(key)
        if recorded is not None:
            self._graphs[key] = self._graphs.pop(key)  # the last used is the last
            # Others may still compare a graph that this rank knows well.
            return _Plan(CHECK if recorded.n_checks > 0 else REPLAY, key)
        self._n_since_launch += 1
        if self._n_since_launch > MOST_EAGER:
            differ = [
                what
                for what, one, other in zip(_PARTS, key, self._last_key, strict=True)
                if one != other
            ]
            what = " and ".join(differ) or "something"
            return _Plan(GIVE_UP, reason=f"in {MOST_EAGER} steps, {what} differed each time")
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
            self._fusion_plans.clear()
        n_seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key in self._never or n_seen < 2 or sum(self._seen.values()) <= N_FIRST:
            return _Plan(EAGER, key)
        if self.n_launched < self.n_recorded * FEWEST_LAUNCHES - MOST_EAGER:
            what = f"{self.n_recorded} recordings, but only {self.n_launched} launches"
            return _Plan(GIVE_UP, reason=f"shapes or settings change too often: {what}")
        return _Plan(RECORD, key)

    def _check_replaced(self, known: Mapping[str, Any]) -> None:
        """Raise NotRecordable if some arrays are other ones in each step."""
        self._n_begun += 1
        arrays = self._circumstances.arrays
        if self._n_begun > MOST_BEGUN and known.keys() == arrays.keys():
            name = next(name for name, array in arrays.items() if array is not known[name])
            raise NotRecordable(f"{name} is replaced in each step: write to it in place")

    def _begin(self) -> None:
        """Start over, because graphs would write to arrays that are not in use any more."""
        self._graphs.clear()
        self._seen.clear()
        self._never.clear()
        self._fusion_plans.clear()
        self._has_asked = self._is_on_gpu = False

    def _end(self, steps: Steps, reasons: Mapping[int, str]) -> None:
        """Record nothing any more. On all ranks."""
        self.settle(steps.optimizer)
        self._is_over = True
        self._graphs.clear()
        self._fusion_plans.clear()
        self._circumstances, self._shared = Circumstances(), None
        steps.tell(f"no CUDA graphs: {_shown(reasons, steps)}. Training goes on without them")

    # ---- a step ----

    def _eager(self, call: _Call, key: Hashable = None) -> None:
        """Take a step without graphs, which may be followed by others with."""
        self.settle(call.steps.optimizer)
        self.n_eager += 1
        if not self._is_on_gpu:
            call.eager()
            return
        self._shared_ones.draw_next()
        if key is None or not is_wanted(np.dtype(np.float16)):
            self._eager_again(call)
            return
        observed = Observed()
        with observed.step():
            self._eager_again(call)
        self._fusion_plans[key] = observed.plan()

    def _eager_again(self, call: _Call) -> None:
        """Take a step without graphs, with the random numbers of the last one."""
        seen, array = self._circumstances, chainer.backends.cuda.ndarray
        with self._shared_ones.draws.step(), noting_results(seen.links, seen.results, array):
            call.eager()

    def _launch(self, call: _Call, recorded: RecordedStep) -> None:
        optimizer, shared = call.steps.optimizer, self._shared_ones
        is_dynamic = optimizer._loss_scaling_is_dynamic
        if self._ahead is not None and (
            recorded is not self._ahead
            or recorded.uses_t
            or self.n_launched % LAUNCHES_BETWEEN_LOOKS == 0
        ):
            self.settle(optimizer)
        shared.scaling.take(optimizer)
        recorded.prepare(call.args, call.kwds, shared.next_key())
        try:
            with call.steps.launching():
                recorded.launch()
        except BaseException:
            recorded.uncount()
            raise
        optimizer.t += 1
        if is_dynamic and self._ahead is None:
            self._ahead = recorded
            for each in (optimizer, *recorded.rules):
                vars(each)["_ahead"] = self, optimizer
        self._circumstances.note_results(recorded.hand_out())
        if recorded.is_new:
            # Links kept the results of the last eager step, and so all that it had computed.
            recorded.is_new = False
            shared.give_back()
        self.n_launched += 1
        self._n_since_launch = 0

    def _record(self, call: _Call, key: Hashable) -> None:
        steps, optimizer = call.steps, call.steps.optimizer
        shared = self._shared_ones
        self.settle(optimizer)
        shared.scaling.take(optimizer)
        self.n_recorded += 1
        prepared = _attempt(lambda: self._prepare(call, key))
        reasons = steps.reasons(prepared.problem)
        if not reasons:
            small, recorded = prepared.result
            rehearsed = _attempt(lambda: recorded.rehearse(call.args, call.kwds))
            reasons = steps.reasons(rehearsed.problem)
            if 0 < len(reasons) < steps.n_ranks or len(set(map(_kind, reasons.values()))) > 1:
                # They may have failed apart: GPUs wait for what others have not sent.
                raise RuntimeError(f"a training step failed: {_shown(reasons, steps)}")
            shared.recorder.wait()
            small.restore()
            reasons = reasons or steps.reasons(rehearsed.result)
        if not reasons:
            reasons = steps.reasons(_attempt(recorded.record).problem)
        if not reasons:
            self._graphs.pop(key, None)
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))  # the one used least recently
            self._graphs[key] = recorded
            self.n_fused = recorded.n_fused
            self._check(call, key)
            return
        self._never.add(key)
        shared.renew_recorder()
        # On all ranks alike: what one of them has recorded is not.
        if self.n_launched:
            steps.tell(f"some steps are not recorded: {_shown(reasons, steps)}")
            self._eager(call)
        else:
            self._end(steps, reasons)
            call.eager()

    def _prepare(self, call: _Call, key: Hashable) -> tuple[State, RecordedStep]:
        shared, target = self._shared_ones, call.steps.optimizer.target
        persistent = dict(circumstances.persistent_arrays(target, self._circumstances.links))
        small = State({**persistent, **shared.scaling.arrays})
        return small, RecordedStep(
            call.steps,
            call.lossfun,
            call.args,
            call.kwds,
            shared.recorder,
            shared.scaling,
            shared.draws,
            self._circumstances,
            self._fusion_plans.get(key, {}),
        )

    def _check(self, call: _Call, key: Hashable) -> None:
        """Compare what a graph does with an eager step; the eager one counts."""
        steps, optimizer, shared = call.steps, call.steps.optimizer, self._shared_ones
        recorded = self._graphs[key]
        self.settle(optimizer)
        shared.scaling.take(optimizer)
        scaling = State(shared.scaling.arrays)
        copied = _attempt(lambda: State(self._circumstances.arrays, n_copies=1))
        if reasons := steps.reasons(copied.problem):
            steps.tell(f"graphs are not compared with eager steps: {_shown(reasons, steps)}")
            recorded.n_checks = 0
            self._eager(call)
            return
        state = copied.result
        recorded.prepare(call.args, call.kwds, shared.draw_next())
        recorded.launch()
        recorded.uncount()
        of_graph = state.now()
        state.restore()
        scaling.restore()
        rules = circumstances.rule_values(optimizer)
        self.n_eager += 1
        with Fused(recorded.fusion_plan, leaves_out=False).step():
            self._eager_again(call)
        was_host = rules != circumstances.rule_values(optimizer)
        if was_host:
            problem: str | None = "update rules change numbers on the host in each step"
        else:
            problem = _attempt(lambda: _check_equal(state.different(of_graph))).problem
        if not (reasons := steps.reasons(problem)):
            recorded.n_checks -= 1
            return
        # Perhaps launches differ, too, or it is only rounding.
        copied = _attempt(state.now)
        if not (failed := steps.reasons(copied.problem)):
            of_eager = copied.result
            state.restore()
            scaling.restore()
            recorded.launch()
            if not was_host:
                problem = _attempt(lambda: _check_equal(state.far(of_graph, of_eager))).problem
            state.restore(of_eager)
            scaling.restore()
            failed = steps.reasons(problem)
        if failed:
            self._end(steps, failed)
        else:
            recorded.n_checks -= 1

    @property
    def _shared_ones(self) -> _Shared:
        if self._shared is None:
            self._shared = _Shared()
        return self._shared


class _Call(NamedTuple):
    steps: Steps
    lossfun: Callable[..., Any]
    args: Sequence[Any]
    kwds: Mapping[str, Any]

    def eager(self) -> None:
        """Do the whole step, without graphs."""
        self.steps.eager(self.lossfun, self.args, self.kwds)


class _Shared:
    """What all graphs of an optimizer share."""

    def __init__(self) -> None:
        self._cupy = chainer.backends.cuda.cupy
        self.scaling = Scaling(chainer)
        self.draws = Draws(self._cupy.zeros(2, np.uint64))
        self._key = (-1, 0)
        self.renew_recorder()

    def renew_recorder(self) -> None:
        self.recorder = Recorder(self._cupy)

    def give_back(self) -> None:
        """Give the GPU the memory that eager steps have used, and the next steps do not need."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def next_key(self) -> tuple[int, int]:
        """Return seed and count of the next step."""
        # CuPy has no public name for the seed; everything else would wait for the GPU.
        seed = int(self._cupy.random.get_random_state()._rk_seed)
        self._key = seed, (self._key[1] + 1 if seed == self._key[0] else 0)
        return self._key

    def draw_next(self) -> tuple[int, int]:
        """Let the next step draw new numbers; return its key."""
        key = self.next_key()
        self.draws.key[...] = self._cupy.asarray(np.array(key, np.uint64))
        return key


class _Attempt(NamedTuple):
    result: Any
    problem: str | None


def _attempt(do: Callable[[], Any]) -> _Attempt:
    """Return what a function returns, or why it failed."""
    try:
        return _Attempt(do(), None)
    except Exception as error:
        text = str(error).strip() or "no message"
        if not isinstance(error, NotRecordable):
            text = f"{type(error).__name__}: {text}{_where(error)}"
        return _Attempt(None, text)


def _where(error: Exception) -> str:
    """Return the innermost line of the script that has led to an error, for a message."""
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and _OWN not in Path(frame.filename).parents
    ]
    return f" (line {lines[-1].lineno} of {lines[-1].filename})" if lines else ""


def _kind(problem: str) -> str:
    """Return a problem without numbers, such as those of ranks."""
    return re.sub(r"0x[0-9a-f]+|\d+", "", problem)


def _check_equal(different: Sequence[str]) -> None:
    """Raise NotRecordable if any arrays differ."""
    if different:
        more = f" and {len(different) - 3} more" * (len(different) > 3)
        raise NotRecordable(
            f"a graph gives other values than an eager step for {', '.join(different[:3])}{more}: "
            "perhaps the model keeps values from step to step, or draws random numbers"
        )


def _shown(reasons: Mapping[int, str], steps: Steps) -> str:
    if steps.n_ranks == 1:
        return next(iter(reasons.values()), "")
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
