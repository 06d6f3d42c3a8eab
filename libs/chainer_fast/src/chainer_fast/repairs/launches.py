"""Launch fewer kernels: with one per parameter, launching takes longer than computing."""

from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast import updates


def update_parameters_at_once(module: ModuleType) -> None:
    """Launch the kernels of an optimizer once for all parameters."""

    @surgery.replaces(module.GradientMethod, "update")
    def update(self: Any, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            if getattr(self, "_use_cleargrads", True):
                self.target.cleargrads()
            else:
                self.target.zerograds()
            loss.backward(loss_scale=self._loss_scale)
            del loss
        self.reallocate_cleared_grads()
        self.check_nan_in_grads()
        self.call_hooks("pre")
        self.t += 1
        if self.is_safe_to_update():
            # Graphs keep the addresses of parameters.
            in_place = getattr(self, "cuda_graphs", None) is not None
            updates.update(list(self.target.params()), module.chainer, in_place=in_place)
        self.reallocate_cleared_grads()
        self.call_hooks("post")
        self.update_loss_scale()

    reallocate = module.GradientMethod.reallocate_cleared_grads

    @surgery.replaces(module.GradientMethod, "reallocate_cleared_grads")
    def reallocate_cleared_grads(self: Any) -> None:
        with module.variable._AllowArrayAccessWithNonstandardLayout():
            some_are_missing = any(each.grad is None for each in self.target.params(False))
        if some_are_missing:
            reallocate(self)

    call_hook = module.Optimizer.call_hook

    @surgery.replaces(module.Optimizer, "call_hook")
    def call_hook_at_once(self: Any, hook: Any) -> None:
        cuda = module.chainer.backends.cuda
        if updates.is_weight_decay(hook):
            parameters = [p for p in self.target.params() if p.array is not None]
            if updates.lie_apart(
                [each for p in parameters for each in (p.array, p.grad)], cuda.ndarray
            ):
                updates.decay(hook, parameters, cuda)
                return
        call_hook(self, hook)
