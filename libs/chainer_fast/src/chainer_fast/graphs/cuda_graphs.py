"""When an optimizer records its steps, launches them, or goes on without graphs.

The first steps are eager: they initialize parameters, choose kernels and fill caches. Then a step
is recorded for each combination of shapes and settings, and compared with eager steps from the
same state, before graphs are launched in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainer_fast.graphs import circumstances
from chainer_fast.graphs.circumstances import Circumstances
from chainer_fast.graphs.drawing import Draws
from chainer_fast.graphs.inputs import NotRecordable, signature
from chainer_fast.graphs.recorded import RecordedStep
from chainer_fast.graphs.recorder import Recorder
from chainer_fast.graphs.scaling import Scaling
from chainer_fast.graphs.state import State
from chainer_fast.graphs.steps import CHECK, EAGER, GIVE_UP, RECORD, REPLAY, Steps

#: Number of eager steps before the first recording.
N_FIRST = 3
#: Most graphs at a time; steps with other shapes or settings are eager.
MOST_GRAPHS = 4
#: Most recordings, and most steps without launching a graph, before giving up.
MOST_RECORDINGS, MOST_EAGER = 16, 64
#: Most steps in a row that find other arrays than the step before.
MOST_BEGUN = 8


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
    """

    def __init__(self) -> None:
        self.n_eager = self.n_recorded = self.n_launched = 0
        self._is_over = self._is_ahead = self._has_asked = self._is_on_gpu = False
        self._circumstances = Circumstances()
        self._graphs: dict[Hashable, RecordedStep] = {}
        self._seen: dict[Hashable, int] = {}
        self._never: set[Hashable] = set()
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
        if self._is_over:
            steps.eager(lossfun, args, kwds)
            return
        call = _Call(steps, lossfun, args, kwds)
        plan = self._plan(call)
        agreed = steps.agree(plan.wish)
        if agreed == GIVE_UP:
            self._give_up(steps, plan.reason)
            steps.eager(lossfun, args, kwds)
        elif agreed == RECORD:
            self._record(call, plan.key)
        elif agreed == CHECK:
            self._check(call, plan.key)
        elif agreed == REPLAY:
            self._launch(call, self._graphs[plan.key])
        else:
            self._eager(call)

    def settle(self, optimizer: Any) -> None:
        """Give the optimizer what the GPU knows better: the loss scale, and skipped steps.

        Waits for the GPU if it has changed them.
        """
        if self._is_ahead and self._shared is not None:
            self._is_ahead = False
            rules = [each.update_rule for each in optimizer.target.params()]
            for each in (optimizer, *filter(None, rules)):
                vars(each).pop("_ahead", None)
            n_skipped = self._shared.scaling.settle(optimizer)
            for rule in filter(None, rules):
                vars(rule)["t"] -= n_skipped

    # ---- what to do ----

    def _plan(self, call: _Call) -> _Plan:
        optimizer, cuda = call.steps.optimizer, chainer.backends.cuda
        known = self._circumstances.arrays
        if not self._circumstances.look(optimizer):
            reason = self._why_not_with(optimizer, known)
            self._begin()
            if reason is not None:
                return _Plan(GIVE_UP, reason=reason)
        else:
            self._n_begun = 0
        if not self._has_asked:
            self._has_asked = True
            if reason := call.steps.why_not():
                return _Plan(GIVE_UP, reason=reason)
        if reason := circumstances.why_not(optimizer):
            return _Plan(GIVE_UP, reason=reason)
        if not self._is_on_gpu:
            arrays = [each.array for each in optimizer.target.params()]
            if not arrays or any(array is None for array in arrays):
                return _Plan(EAGER)
            if not all(isinstance(array, cuda.ndarray) for array in arrays):
                return _Plan(GIVE_UP, reason="the model is not on a GPU")
            self._is_on_gpu = True
        if circumstances.why_not_now():
            return _Plan(EAGER)
        try:
            key = (
                circumstances.key_of_function(call.lossfun),
                signature((tuple(call.args), dict(call.kwds)), cuda.ndarray),
                self._circumstances.number,
                call.steps.key(),
            )
        except NotRecordable as error:
            return _Plan(GIVE_UP, reason=str(error))
        return self._plan_for(key)

    def _plan_for(self, key: Hashable) -> _Plan:
        recorded = self._graphs.get(key)
        if recorded is not None:
            return _Plan(CHECK if recorded.n_checks else REPLAY, key)
        self._n_since_launch += 1
        if self._n_since_launch > MOST_EAGER:
            what = f"in {MOST_EAGER} steps, no combination of shapes and settings came back"
            return _Plan(GIVE_UP, reason=f"{what}: {len(self._seen)} were seen")
        n_seen = self._seen[key] = self._seen.get(key, 0) + 1
        may_record = key not in self._never and len(self._graphs) < MOST_GRAPHS
        if not may_record or n_seen < 2 or sum(self._seen.values()) <= N_FIRST:
            return _Plan(EAGER, key)
        if self.n_recorded >= MOST_RECORDINGS:
            return _Plan(GIVE_UP, reason=f"{MOST_RECORDINGS} recordings became useless")
        return _Plan(RECORD, key)

    def _why_not_with(self, optimizer: Any, known: list[Any]) -> str | None:
        """Return why there can be no graphs, if some arrays are other ones in each step."""
        self._n_begun += 1
        arrays = self._circumstances.arrays
        if self._n_begun <= MOST_BEGUN or len(arrays) != len(known):
            return None
        names = circumstances.names_of_places(optimizer)
        triples = zip(names, arrays, known, strict=True)
        replaced = next(name for name, array, before in triples if array is not before)
        return f"{replaced} is replaced in each step: write to it in place"

    def _begin(self) -> None:
        """Start over, because graphs would write to arrays that are not in use any more."""
        self._graphs.clear()
        self._seen.clear()
        self._never.clear()
        self._has_asked = self._is_on_gpu = False

    def _give_up(self, steps: Steps, reason: str | None) -> None:
        self.settle(steps.optimizer)
        reasons = steps.reasons(reason)
        self._is_over = True
        self._graphs.clear()
        self._circumstances, self._shared = Circumstances(), None
        steps.tell(f"no CUDA graphs: {_shown(reasons, steps)}. Training goes on without them")

    # ---- a step ----

    def _eager(self, call: _Call) -> None:
        self.settle(call.steps.optimizer)
        self.n_eager += 1
        shared = self._shared_by(call.steps)
        shared.draw_next()
        with shared.draws.step():
            call.steps.eager(call.lossfun, call.args, call.kwds)

    def _launch(self, call: _Call, recorded: RecordedStep) -> None:
        optimizer, shared = call.steps.optimizer, self._shared_by(call.steps)
        is_dynamic = optimizer._loss_scaling_is_dynamic
        if recorded.uses_t and is_dynamic:
            self.settle(optimizer)
        shared.scaling.take(optimizer)
        recorded.prepare(call.args, call.kwds, shared.next_key())
        with call.steps.launching():
            recorded.launch()
        optimizer.t += 1
        if is_dynamic and not self._is_ahead:
            self._is_ahead = True
            rules = [each.update_rule for each in optimizer.target.params()]
            for each in (optimizer, *filter(None, rules)):
                vars(each)["_ahead"] = self, optimizer
        self._circumstances.note_attributes(recorded.hand_out())
        self.n_launched += 1
        self._n_since_launch = 0

    def _record(self, call: _Call, key: Hashable) -> None:
        steps, optimizer = call.steps, call.steps.optimizer
        shared = self._shared_by(steps)
        self.settle(optimizer)
        shared.scaling.take(optimizer)
        self.n_recorded += 1
        shared.draw_next()
        small = State([*circumstances.persistent_arrays(optimizer.target), *shared.scaling.arrays])
        recorded = RecordedStep(
            steps,
            call.lossfun,
            call.args,
            call.kwds,
            shared.recorder,
            shared.scaling,
            shared.draws,
        )
        problem = _attempt(lambda: recorded.rehearse(call.args, call.kwds))
        reasons = steps.reasons(problem)
        if 0 < len(reasons) < steps.n_ranks:
            # The GPUs of the others wait for what these have not sent.
            raise RuntimeError(f"a training step failed: {_shown(reasons, steps)}")
        shared.recorder.wait()
        small.restore()
        if not reasons:
            problem = _attempt(recorded.record)
            reasons = steps.reasons(problem)
        if not reasons:
            self._graphs[key] = recorded
            self._check(call, key)
            return
        self._never.add(key)
        shared.renew_recorder()
        if self._graphs:
            steps.tell(
                f"steps with other shapes or settings are not recorded: {_shown(reasons, steps)}"
            )
        else:
            self._give_up(steps, problem)
        self._eager_without_key(call)

    def _eager_without_key(self, call: _Call) -> None:
        if self._is_over:
            call.steps.eager(call.lossfun, call.args, call.kwds)
        else:
            self._eager(call)

    def _check(self, call: _Call, key: Hashable) -> None:
        """Compare what a graph does with an eager step; the eager one counts."""
        steps, optimizer = call.steps, call.steps.optimizer
        shared, recorded = self._shared_by(steps), self._graphs[key]
        self.settle(optimizer)
        shared.scaling.take(optimizer)
        arrays = [each for each in self._circumstances.arrays if each is not None]
        state: State | None = None
        of_graph: list[Any] = []
        problem = None
        try:
            state = State([*arrays, *shared.scaling.arrays])
            of_graph = state.now()
        except MemoryError as error:  # CuPy's is one
            problem = f"the copy of the model's state does not fit into memory ({error})"
        if reasons := steps.reasons(problem):
            steps.tell(f"graphs are not compared with eager steps: {_shown(reasons, steps)}")
            recorded.n_checks = 0
            self._eager(call)
            return
        assert state is not None
        key_of_draws = shared.draw_next()
        t, host = optimizer.t, _HostState(optimizer)
        recorded.prepare(call.args, call.kwds, key_of_draws)
        recorded.launch()
        recorded.uncount()
        of_graph = state.now()
        state.restore()
        values = circumstances.rule_values(optimizer)
        self._eager_again(call)
        problem = self._difference(optimizer, state, of_graph, values)
        if not (reasons := steps.reasons(problem)):
            recorded.n_checks -= 1
            return
        # Perhaps eager steps differ, too.
        of_eager = state.now()
        state.restore()
        host.restore()
        self._eager_again(call)
        names = circumstances.names_of_places(optimizer)
        problem = None
        if not state.different(of_eager) or values != circumstances.rule_values(optimizer):
            problem = reasons.get(min(reasons)) if reasons else None
        elif far := state.far(of_graph, of_eager):
            problem = _differs([names[k] for k in far if k < len(names)])
        assert optimizer.t == t + 1
        if steps.reasons(problem):
            self._give_up(steps, problem)
        else:
            recorded.n_checks -= 1

    def _eager_again(self, call: _Call) -> None:
        shared = self._shared_by(call.steps)
        with shared.draws.step():
            call.steps.eager(call.lossfun, call.args, call.kwds)

    def _difference(
        self, optimizer: Any, state: State, of_graph: list[Any], values: list[Any]
    ) -> str | None:
        if values != circumstances.rule_values(optimizer):
            return "update rules change numbers on the host in each step"
        names = circumstances.names_of_places(optimizer)
        if different := [k for k in state.different(of_graph) if k < len(names)]:
            return _differs([names[k] for k in different])
        return None

    def _shared_by(self, steps: Steps) -> _Shared:
        if self._shared is None:
            self._shared = _Shared()
        return self._shared


class _Call(NamedTuple):
    steps: Steps
    lossfun: Callable[..., Any]
    args: Sequence[Any]
    kwds: Mapping[str, Any]


class _HostState:
    """What an eager step changes on the host: counters, and attributes of links."""

    _names = ("t", "_loss_scale", "_loss_scaling_isnan", "_loss_scaling_isnan_ever")

    def __init__(self, optimizer: Any) -> None:
        rules = [each.update_rule for each in optimizer.target.params()]
        self._saved = [
            (each, {name: vars(each)[name] for name in self._names if name in vars(each)})
            for each in (optimizer, *filter(None, rules))
        ]
        self._saved += [(link, dict(vars(link))) for link in optimizer.target.links()]

    def restore(self) -> None:
        for each, saved in self._saved:
            vars(each).update(saved)


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


def _attempt(do: Callable[[], Any]) -> str | None:
    """Return why something failed, or None."""
    try:
        do()
    except Exception as error:
        text = str(error).strip() or "no message"
        return text if isinstance(error, NotRecordable) else f"{type(error).__name__}: {text}"
    return None


def _differs(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return (
        f"a graph gives other values than an eager step for {', '.join(names[:3])}{more}: perhaps "
        "the model keeps values from step to step, or draws random numbers"
    )


def _shown(reasons: Mapping[int, str], steps: Steps) -> str:
    if steps.n_ranks == 1:
        return next(iter(reasons.values()), "")
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
