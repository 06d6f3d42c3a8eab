"""What a step hands to the script: what it reports, and what links keep as attributes.

A graph writes its results to the same memory each time. So the script gets copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
from chainer import reporter

from chainer_fast.graphs.inputs import NotRecordable


class Outputs:
    """The results of a recorded step.

    Parameters
    ----------
    model
        Link whose attributes are looked at.
    array
        Class of arrays in GPU memory.
    """

    def __init__(self, model: chainer.Link, array: type) -> None:
        self._links = list(model.links())
        self._array = array
        self._reported: dict[str, Any] = {}
        self._attributes: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take what the step in the ``with`` block hands out; the script does not see it.

        Raises
        ------
        NotRecordable
            If it reports a number of the host, which would stay the same.
        """
        before = [dict(vars(link)) for link in self._links]
        self._reported = {}
        try:
            if _observation() is None:
                yield
            else:
                with reporter.get_current_reporter().scope(self._reported):
                    yield
            for name, value in self._reported.items():
                if self._array_of(value) is None:
                    raise NotRecordable(
                        f"it reports {name!r}, which is not in GPU memory: {value!r}"
                    )
            self._attributes = [
                (link, name, value)
                for link, old in zip(self._links, before, strict=True)
                for name, value in vars(link).items()
                if value is not old.get(name) and self._array_of(value) is not None
            ]
        finally:
            for link, old in zip(self._links, before, strict=True):
                for name in vars(link).keys() - old.keys():
                    delattr(link, name)
                vars(link).update(old)

    def forget_functions(self) -> None:
        """Let go of the functions that computed the results, and of what they keep."""
        for _, _, value in self._attributes:
            if isinstance(value, chainer.Variable):
                value.unchain()

    @property
    def arrays(self) -> list[Any]:
        """The arrays that are handed out."""
        values = [*self._reported.values(), *[value for *_, value in self._attributes]]
        return [self._array_of(value) for value in values]

    def hand_out(self) -> list[Any]:
        """Report copies of the results, and give them to the links; return these."""
        copies: dict[int, Any] = {}
        observation = _observation()
        if observation is not None:
            for name, value in self._reported.items():
                observation[name] = self._copy(value, copies)
        for link, name, value in self._attributes:
            vars(link)[name] = self._copy(value, copies)
        return [link for link, *_ in self._attributes]

    def _copy(self, value: Any, copies: dict[int, Any]) -> Any:
        array = self._array_of(value)
        if id(array) not in copies:
            copies[id(array)] = array.copy()
        copy = copies[id(array)]
        if not isinstance(value, chainer.Variable):
            return copy
        return chainer.Variable(copy, requires_grad=value.requires_grad)

    def _array_of(self, value: Any) -> Any:
        """Return the array of a result; None if it is not in GPU memory."""
        if isinstance(value, chainer.Parameter):
            return None
        array = value.array if isinstance(value, chainer.Variable) else value
        return array if isinstance(array, self._array) else None


def _observation() -> dict[str, Any] | None:
    """Return where values are reported to; None outside of a trainer and of scopes."""
    try:
        found: dict[str, Any] = reporter.get_current_reporter().observation
    except IndexError:
        return None
    return found
