"""Let optimizers do their steps as CUDA graphs."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

from chainer_compat import settings, surgery

#: ``CHAINER_CUDA_GRAPHS=1``: all optimizers use CUDA graphs.
VARIABLE = "CHAINER_CUDA_GRAPHS"


def can_be_asked_for() -> bool:
    """Return True: what cannot use graphs says so when it is asked to."""
    return True


def use_graphs_if_asked(module: ModuleType) -> None:
    """Add ``use_cuda_graphs`` to optimizers, and let ``update`` heed it."""
    method = module.GradientMethod

    def use_cuda_graphs(self: Any, use: bool = True) -> None:
        """Record steps as CUDA graphs, and launch these in place of the steps.

        ``update(lossfun, ...)`` then runs Python code only in the first steps, and whenever
        shapes or settings change. What cannot be recorded goes on without graphs, and says so
        once.

        Parameters
        ----------
        use : bool
            False switches graphs off.
        """
        if (found := self.cuda_graphs) is not None:
            found.settle(self)
        self.cuda_graphs = _new_graphs() if use else None

    def cuda_graphs(self: Any) -> Any:
        """Return the graphs of this optimizer, a `CudaGraphs`, or None."""
        if "_cuda_graphs" not in vars(self):
            if not settings.is_on(VARIABLE):
                return None
            self.cuda_graphs = _new_graphs()
        return vars(self)["_cuda_graphs"]

    def set_cuda_graphs(self: Any, graphs: Any) -> None:
        if graphs is not None:
            _let_the_gpu_know(module)  # this makes reading them slower
        vars(self)["_cuda_graphs"] = graphs

    method.use_cuda_graphs = use_cuda_graphs
    method.cuda_graphs = property(cuda_graphs, set_cuda_graphs)
    eager = method.update

    @surgery.replaces(method, "update")
    def update(self: Any, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        graphs = self.cuda_graphs
        if graphs is None or lossfun is None:
            eager(self, lossfun, *args, **kwds)
            return
        from chainer_fast.graphs.one_process import OneProcess

        graphs.update(OneProcess(self, eager), lossfun, args, kwds)


def _new_graphs() -> Any:
    # Importing it needs Chainer, which is being imported when this module is.
    from chainer_fast.graphs.cuda_graphs import CudaGraphs

    return CudaGraphs()


def _let_the_gpu_know(module: ModuleType) -> None:
    """Let whoever reads certain attributes wait for the GPU, if graphs have changed them there."""
    for owner, name in (
        (module.Optimizer, "_loss_scale"),
        (module.Optimizer, "_loss_scaling_isnan"),
        (module.Optimizer, "_loss_scaling_isnan_ever"),
        (module.UpdateRule, "t"),
    ):
        if not isinstance(vars(owner).get(name), _KnownByGpu):
            setattr(owner, name, _KnownByGpu(name, getattr(owner, name, 0)))
    for owner in (module.Optimizer, module.UpdateRule):
        owner.__getstate__ = _state


class _KnownByGpu:
    """An attribute that graphs may have changed on the GPU: whoever reads it waits for that."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, owner: Any, type_: Any = None) -> Any:
        if owner is None:
            return self._default
        _settle(owner)
        return vars(owner).get(self._name, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        _settle(owner)
        vars(owner)[self._name] = value


def _settle(owner: Any) -> None:
    if "_ahead" in vars(owner):
        graphs, optimizer = vars(owner)["_ahead"]
        graphs.settle(optimizer)


def _state(self: Any) -> dict[str, Any]:
    """Return what copies and pickles of an optimizer or update rule contain."""
    _settle(self)
    found = dict(vars(self))
    if found.get("_cuda_graphs") is not None:
        found["_cuda_graphs"] = copy.copy(found["_cuda_graphs"])
    return found
