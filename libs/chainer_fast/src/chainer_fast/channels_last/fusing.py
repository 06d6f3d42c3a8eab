"""Compute batch normalization, an addition and ReLU by one kernel, if nothing reads in between.

An eager step shows where: a hook notes what functions read, and `Variable.array` what other code
does. A recorded step then leaves out what lies between, until something unexpected reads it. The
eager steps that it is compared with run the same kernels, and compute what lies between as well.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chainer
from chainer.functions.activation.relu import ReLU
from chainer.functions.math.basic_math import Add

from chainer_fast.channels_last.current_step import taking_part
from chainer_fast.channels_last.layout import as_shaped, as_stored, is_channels_last
from chainer_fast.cudnn.fused_normalization import Normalization, Then

#: What is computed with each normalization of a step, by its number in the step.
FusionPlan = Mapping[int, Then]


class _Between:
    """The result of a normalization, or its sum with another array, which ReLU may read.

    Attributes
    ----------
    number : int
        Number of the normalization in the step.
    normalization : Normalization
    z : array or None
        The other array of the sum.
    is_read : bool
        Whether the planned function has read it.
    """

    def __init__(self, number: int, normalization: Normalization, z: Any = None) -> None:
        self.number, self.normalization, self.z = number, normalization, z
        self.is_read = False

    @property
    def then(self) -> Then:
        """What is computed with the normalization if ReLU follows."""
        return Then.RELU if self.z is None else Then.ADD_RELU


class _Step(chainer.FunctionHook):
    """A step that knows the arrays between normalizations and ReLUs, as long as they exist."""

    name = "chainer_fast.fusing"

    def __init__(self) -> None:
        super().__init__()
        self._n_normalizations = 0
        self._between: dict[int, tuple[weakref.ref[Any], _Between]] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Take part in the step in the ``with`` block, on this thread."""
        try:
            with self, taking_part(self):
                yield
        finally:
            self._between.clear()

    def _find(self, array: Any) -> _Between | None:
        reference, found = self._between.get(id(array), (None, None))
        return found if reference is not None and reference() is array else None

    def _note(self, array: Any, between: _Between) -> None:
        key, known = id(array), self._between

        def forget(reference: weakref.ref[Any]) -> None:
            if key in known and known[key][0] is reference:
                del known[key]

        known[key] = weakref.ref(array, forget), between

    def _count(self) -> int:
        self._n_normalizations += 1
        return self._n_normalizations - 1

    def _of_sum(self, inputs: tuple[Any, ...]) -> tuple[_Between, Any] | None:
        """Return a normalization that is added to an array like it, and this array."""
        if len(inputs) == 2 and inputs[0] is not inputs[1]:
            for one, other in (inputs, inputs[::-1]):
                is_like = one.shape == other.shape and one.dtype == other.dtype
                found = self._find(one)
                if is_like and found is not None and found.z is None and not found.is_read:
                    return found, other
        return None


def _has_other_hooks(function: Any) -> bool:
    """Return whether hooks of the program see what a function reads."""
    return len(chainer.get_function_hooks()) > 1 or bool(function.local_function_hooks)


class Observed(_Step):
    """An eager step that shows what the next one may compute together."""

    def __init__(self) -> None:
        super().__init__()
        self._then: dict[int, Then] = {}
        #: What has read a result, or a sum: classes of functions, and None for all other code.
        self._readers: defaultdict[tuple[int, Then], list[type | None]] = defaultdict(list)

    def plan(self) -> FusionPlan:
        """Return what may be computed together."""
        readers = self._readers
        first = {Then.RELU: ReLU, Then.ADD_RELU: Add}
        return {
            number: then
            for number, then in self._then.items()
            if readers[number, Then.RELU] == [first[then]] and readers[number, then] == [ReLU]
        }

    def normalize(self, normalization: Normalization) -> Any:
        """See `Step`."""
        y = normalization.launch()
        self._note(y, _Between(self._count(), normalization))
        return y

    def add(self, inputs: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """See `Step`."""
        y = compute()
        if is_channels_last(y) and (found := self._of_sum(inputs)) is not None:
            between, z = found
            self._note(y, _Between(between.number, between.normalization, z))
        return y

    def rectify(self, x: Any) -> None:
        """Return None, so that ReLU computes as always."""
        if (found := self._find(x)) is not None:
            self._then[found.number] = found.then

    def read(self, array: Any) -> None:
        """See `Step`."""
        self._read(array, None)

    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Note who reads."""
        reader = None if _has_other_hooks(function) else type(function)
        for array in in_data:
            self._read(array, reader)

    def _read(self, array: Any, reader: type | None) -> None:
        if (found := self._find(array)) is not None:
            self._readers[found.number, found.then].append(reader)


class Fused(_Step):
    """A step that fuses what an earlier one has shown to be possible.

    Parameters
    ----------
    plan
        Result of `Observed.plan`.
    leaves_out
        Whether to leave out what lies between, unless something unexpected reads it.

    Attributes
    ----------
    n_fused : int
        Number of normalizations that were computed with ReLU.
    """

    def __init__(self, plan: FusionPlan, *, leaves_out: bool) -> None:
        super().__init__()
        self._plan, self._leaves_out = plan, leaves_out
        self._waiting: dict[int, Normalization] = {}
        self._expected: tuple[_Between, Any] | None = None
        self.n_fused = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Take part in the step in the ``with`` block, on this thread."""
        with super().step():
            yield
            self._finish_all()

    def normalize(self, normalization: Normalization) -> Any:
        """See `Step`."""
        number = self._count()
        self._settle(normalization.averages or ())
        if number not in self._plan:
            return normalization.launch()
        if self._leaves_out:
            y = normalization.empty()
            self._waiting[number] = normalization
        else:
            y = normalization.launch()
        self._note(y, _Between(number, normalization))
        return y

    def add(self, inputs: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """See `Step`."""
        if self._expected is None:
            return compute()
        between, z = self._expected
        if self._leaves_out:
            y = between.normalization.empty()
        else:  # with a copy, so that the comparison shows whether it is changed before ReLU
            y, z = compute(), as_shaped(as_stored(z).copy())
        self._note(y, _Between(between.number, between.normalization, z))
        return y

    def rectify(self, x: Any) -> tuple[Any, Normalization] | None:
        """See `Step`."""
        if self._expected is None:
            return None
        between, _ = self._expected
        self._waiting.pop(between.number, None)
        self.n_fused += 1
        return between.normalization.launch(between.then, between.z), between.normalization

    def read(self, array: Any) -> None:
        """See `Step`."""
        if (found := self._find(array)) is not None:
            self._finish(array, found)

    def forward_preprocess(self, function: Any, in_data: tuple[Any, ...]) -> None:
        """Compute what a function reads unexpectedly."""
        self._settle(in_data)
        self._expected = expected = self._planned(function, in_data)
        for array in in_data:
            found = self._find(array)
            if found is not None and (expected is None or found is not expected[0]):
                self._finish(array, found)
        if expected is not None:
            expected[0].is_read = True

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        """Compute all that was left out: programs may have kept it, and averages move."""
        if self._waiting or self._between:
            self._finish_all()

    def _settle(self, arrays: Sequence[Any]) -> None:
        """Move averages before anything else reads or moves them."""
        for number, waiting in list(self._waiting.items()):
            if any(one is other for one in waiting.averages or () for other in arrays):
                self._waiting.pop(number).launch()

    def _planned(self, function: Any, inputs: tuple[Any, ...]) -> tuple[_Between, Any] | None:
        """Return what a function reads as planned, and the other addend."""
        found: tuple[_Between, Any] | None = None
        reader = None if _has_other_hooks(function) else type(function)
        if reader is Add:
            found, then = self._of_sum(inputs), Then.ADD_RELU
        elif reader is ReLU and (between := self._find(inputs[0])) is not None:
            found, then = (between, None), between.then
        if found is None or found[0].is_read or self._plan[found[0].number] is not then:
            return None
        return found

    def _finish(self, array: Any, between: _Between) -> None:
        """Compute what was left out, for a reader whose gradient counts, too."""
        del self._between[id(array)]
        between.normalization.is_shared = True
        if not self._leaves_out:
            return
        self._waiting.pop(between.number, None)
        if between.z is None:
            between.normalization.launch(y=array)
        else:
            y = between.normalization.launch()
            xp = chainer.backend.get_array_module(y)
            xp.add(as_stored(y), as_stored(between.z), out=as_stored(array))

    def _finish_all(self) -> None:
        for reference, between in list(self._between.values()):
            if (array := reference()) is not None:
                self._finish(array, between)
        while self._waiting:
            self._waiting.popitem()[1].launch()
