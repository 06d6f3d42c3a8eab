"""What a step hands to the script: what it reports, and what links keep as attributes.

A graph writes its results to the same memory each time. So the script gets copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import chainer
from chainer import reporter

from chainer_fast.graphs.circumstances import Attribute
from chainer_fast.graphs.inputs import NotRecordable


class Outputs:
    """The results of a recorded step.

    Parameters
    ----------
    links
        Links whose attributes are looked at.
    results
        Attributes that steps replace by arrays, as pairs of a link's id and a name. A step that
        read them would depend on the step before.
    array
        Class of arrays in GPU memory.
    """

    def __init__(
        self, links: Sequence[chainer.Link], results: set[tuple[int, str]], array: type
    ) -> None:
        self._links, self._results, self._array = links, results, array
        self._reported: dict[str, Any] = {}
        self._attributes: list[tuple[Any, str, Any]] = []

    @property
    def hidden(self) -> str:
        """Names of the attributes of the step before, which `taken` hides."""
        names = [
            f"{type(link).__name__}.{name}"
            for link in self._links
            for name in vars(link)
            if (id(link), name) in self._results
        ]
        return ", ".join(names)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take what the step in the ``with`` block hands out; the script does not see it.

        Raises
        ------
        NotRecordable
            If it hands out something that would stay the same, or that cannot be copied.
        """
        before = [dict(vars(link)) for link in self._links]
        lists = _lists_in(before)
        lengths = [len(each) for each in lists]
        for link in self._links:
            for name in vars(link):
                if (id(link), name) in self._results:
                    vars(link)[name] = None
        self._reported = {}
        try:
            with _scope(self._reported):
                yield
            self._take(before)
            if lengths != [len(each) for each in lists]:
                raise NotRecordable("it changes the length of a list that a link has")
        finally:
            for link, old in zip(self._links, before, strict=True):
                for name in vars(link).keys() - old.keys():
                    del vars(link)[name]
                vars(link).update(old)

    def _take(self, before: Sequence[dict[str, Any]]) -> None:
        for name, value in self._reported.items():
            if array_of(value, self._array) is None:
                raise NotRecordable(f"it reports {name!r}, which is not in GPU memory")
        self._attributes = []
        for link, old in zip(self._links, before, strict=True):
            for name, value in vars(link).items():
                if value is old.get(name, _MISSING) and (id(link), name) not in self._results:
                    continue
                if holds_arrays(value, self._array):
                    raise NotRecordable(
                        f"it assigns arrays in a {type(value).__name__} to {name!r} of a "
                        f"{type(link).__name__}"
                    )
                self._attributes.append((link, name, value))

    def forget_functions(self) -> None:
        """Let go of the functions that computed the results, and of what they keep."""
        for _, _, value in self._attributes:
            if isinstance(value, chainer.Variable):
                value.unchain()

    def hand_out(self) -> list[Attribute]:
        """Report copies of the results, and give them to the links; return which got some."""
        copies: dict[int, Any] = {}
        observation = _observation()
        if observation is not None:
            for name, value in self._reported.items():
                observation[name] = self._copy(value, copies)
        for link, name, value in self._attributes:
            vars(link)[name] = self._copy(value, copies)
        return [(link, name) for link, name, _ in self._attributes]

    def _copy(self, value: Any, copies: dict[int, Any]) -> Any:
        array = array_of(value, self._array)
        if array is None:
            return value
        if id(array) not in copies:
            copies[id(array)] = array.copy()
        copy = copies[id(array)]
        if not isinstance(value, chainer.Variable):
            return copy
        return chainer.Variable(copy, requires_grad=value.requires_grad)


@contextlib.contextmanager
def noting_results(
    links: Sequence[chainer.Link], results: set[tuple[int, str]], array: type
) -> Iterator[None]:
    """Note the attributes of links that the step in the ``with`` block replaces by arrays."""
    before = [dict(vars(link)) for link in links]
    yield
    results.clear()
    for link, old in zip(links, before, strict=True):
        for name, value in vars(link).items():
            is_other = value is not old.get(name) and name not in link._persistent
            if is_other and array_of(value, array) is not None:
                results.add((id(link), name))


def array_of(value: Any, array: type) -> Any:
    """Return the array of a result; None if it is a parameter, or not in GPU memory."""
    if isinstance(value, chainer.Parameter):
        return None
    found = value.array if isinstance(value, chainer.Variable) else value
    return found if isinstance(found, array) else None


def holds_arrays(value: Any, array: type) -> bool:
    """Return whether a container holds arrays or variables."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return any(isinstance(each, (array, chainer.Variable)) for each in value)


_MISSING = object()


def _lists_in(attributes: Sequence[dict[str, Any]]) -> list[Any]:
    values = [value for each in attributes for value in each.values()]
    return [value for value in values if isinstance(value, (list, dict))]


@contextlib.contextmanager
def _scope(observation: dict[str, Any]) -> Iterator[None]:
    """Report to a dictionary, if anybody listens."""
    if _observation() is None:
        yield
    else:
        with reporter.get_current_reporter().scope(observation):
            yield


def _observation() -> dict[str, Any] | None:
    """Return where values are reported to; None outside of a trainer and of scopes."""
    try:
        found: dict[str, Any] = reporter.get_current_reporter().observation
    except IndexError:
        return None
    return found
