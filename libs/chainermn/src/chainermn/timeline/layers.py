"""Spans of single layers, forward and backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import chainer

from chainermn import spans


@contextlib.contextmanager
def layers_observed() -> Iterator[None]:
    """Have spans made of each link's forward and each function's backward in the ``with`` block.

    A function's backward has the name of the innermost link that called the function.
    """
    links = _Links()
    with links, _Functions(links):
        yield


class _Links(chainer.LinkHook):
    name = "chainermn-timeline"

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []

    @property
    def innermost(self) -> str:
        """Name of the link that is at work; empty if none is."""
        return self._open[-1][0] if self._open else ""

    def forward_preprocess(self, args: Any) -> None:
        kind = type(args.link).__name__
        name = f"{args.link.name} ({kind})" if args.link.name else kind
        self._open.append((name, spans.now()))

    def forward_postprocess(self, args: Any) -> None:
        name, start = self._open.pop()
        spans.add(name, start, spans.now())


class _Functions(chainer.FunctionHook):
    name = "chainermn-timeline"

    def __init__(self, links: _Links) -> None:
        self._links = links
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._start = 0

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        self._owners[function] = self._links.innermost

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._start = spans.now()

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        owner = self._owners.get(function, "")
        name = f"{owner}: {function.label}" if owner else function.label
        spans.add(name, self._start, spans.now())
