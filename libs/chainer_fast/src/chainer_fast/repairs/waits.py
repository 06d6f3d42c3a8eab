"""Make the host wait for a GPU less often than Chainer does."""

from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast import updates


def look_at_all_gradients_at_once(module: ModuleType) -> None:
    """Check once whether all gradients are finite; only if not, find out which are."""
    original = module.Optimizer.check_nan_in_grads

    @surgery.replaces(module.Optimizer, "check_nan_in_grads")
    def check_nan_in_grads(self: Any) -> None:
        cuda = module.chainer.backends.cuda
        parameters = list(self.target.params()) if self._loss_scaling_is_dynamic else []
        devices = [parameter.device for parameter in parameters]
        on_one_gpu = devices and all(d.xp is cuda.cupy and d == devices[0] for d in devices)
        if not on_one_gpu or any(parameter.grad is None for parameter in parameters):
            original(self)
            return
        with module.chainer.using_device(devices[0]):
            found = cuda.cupy.zeros((), bool)
            updates.look([parameter.grad for parameter in parameters], found, cuda)
        self._loss_scaling_isnan = bool(found)
        if self._loss_scaling_isnan:
            original(self)
