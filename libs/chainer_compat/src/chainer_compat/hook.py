"""The start-up hook: a finder that costs nothing until Chainer is imported.

This module runs at every start of the interpreter, so it only imports ``sys``. Everything else is
imported when a program imports ``chainer`` or ``chainermn``.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Finder:
    """Finds ``chainermn`` and ``ideep4py``, and wraps the loaders of modules to repair."""

    def __init__(self) -> None:
        # The names of the modules to repair join this set when Chainer is first imported.
        self.names = frozenset({"chainer", "chainermn", "ideep4py", "onnx_chainer"})

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Return a spec for the modules this package cares about, None for all others."""
        if fullname not in self.names:
            return None

        from chainer_compat import loading, settings

        if settings.disabled():
            return None
        if fullname == "chainermn":
            return None if settings.bundled_chainermn() else loading.find_chainermn()
        if fullname == "ideep4py":
            return loading.find_ideep4py(self, path, target)
        if fullname in ("chainer", "onnx_chainer"):
            self.names |= loading.repaired_modules()
        return loading.find_repaired(self, fullname, path, target)


def install() -> None:
    """Put the finder in place, once; further calls do nothing.

    A ``.pth`` file does this at every start of the interpreter. Call it yourself if Python does
    not process ``.pth`` files: under ``python -S``, or if the packages are in a
    ``pip install --target`` folder or on ``PYTHONPATH``.

    Raises
    ------
    RuntimeError
        If Chainer is already imported, because then it is too late to repair it.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if "chainer" in sys.modules:
        raise RuntimeError(
            "chainer_compat.install() was called after `import chainer`. "
            "Call it first, before anything imports chainer or chainermn."
        )
    sys.meta_path.insert(0, Finder())
