"""Make spans of single layers, in forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import chainer

from chainermn import spans
from chainermn.channels_last import is_channels_last
from chainermn.profiling.timeline import conversions


@contextlib.contextmanager
def layer_spans(are_wanted: bool = True) -> Iterator[None]:
    """Make spans of each link's forward and each function's backward in the ``with`` block.

    The backward of a function is named after the innermost link that called the function.
    """
    if not are_wanted:
        yield
        return
    links = _Links()
    with links, _Functions(links):
        yield


class _Links(chainer.LinkHook):
    def __init__(self) -> None:
        self.name = f"chainermn-timeline-{id(self)}"
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []

    @property
    def innermost(self) -> str:
        """Name of the innermost link that is running; empty if there is none."""
        return self._open[-1][0] if self._open else ""

    def forward_preprocess(self, args: Any) -> None:
        kind = type(args.link).__name__
        name = f"{args.link.name} ({kind})" if args.link.name else kind
        measured = spans.span(name)
        self._open.append((name, measured))
        measured.__enter__()

    def forward_postprocess(self, args: Any) -> None:
        self._open.pop()[1].__exit__(None, None, None)


class _Functions(chainer.FunctionHook):
    def __init__(self, links: _Links) -> None:
        self.name = f"chainermn-timeline-{id(self)}"
        self._links = links
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # Spans of running backwards, innermost last, since F.forget runs another backward inside.
        self._open: list[AbstractContextManager[Any]] = []
        # The last function, if it got images channels last. It has no results yet when it ends.
        self._last: Any = None

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        self._look_at_results()

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        self._owners[function] = self._links.innermost
        if any(is_channels_last(array) for array in in_data if array is not None):
            self._last = function

    def _look_at_results(self) -> None:
        function, self._last = self._last, None
        nodes = [reference() for reference in getattr(function, "outputs", None) or ()]
        variables = [node.get_variable_or_none() for node in nodes if node is not None]
        if any(_undoes(each.array) for each in variables if each is not None):
            conversions.record(conversions.Conversion(function.label, self._owners[function]))

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._look_at_results()
        owner = self._owners.get(function, "")
        measured = spans.span(f"{owner}: {function.label}" if owner else function.label)
        self._open.append(measured)
        measured.__enter__()

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def _undoes(array: Any) -> bool:
    """Tell whether an array holds images that could lie channels last, but do not."""
    if array.ndim != 4 or is_channels_last(array):
        return False
    _, n_channels, height, width = array.shape
    return bool(n_channels > 1 and height * width > 1)
