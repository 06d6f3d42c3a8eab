"""Let Chainer's networks for images take the weights of torchvision."""

import os
from collections import OrderedDict
from types import ModuleType
from typing import Any

from chainer_compat import surgery, tensors


def take_torchvisions_resnet(module: ModuleType) -> None:
    _take_torchvisions(module, "resnet50-11ad3fa6.pth")
    layers = module.ResNetLayers
    init = layers.__init__

    @surgery.replaces(layers, "__init__")
    def __init__(self: Any, pretrained_model: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(pretrained_model, os.PathLike):
            pretrained_model = os.fspath(pretrained_model)  # it is asked for its ending
        init(self, pretrained_model, *args, **kwargs)

    _pool_as_torchvision(layers)


def take_torchvisions_vgg(module: ModuleType) -> None:
    _take_torchvisions(module, "vgg16-397923af.pth")
    for layers in (module.VGG16Layers, module.VGG19Layers):
        _pool_as_torchvision(layers)


def refuse_torchvisions_googlenet(module: ModuleType) -> None:
    own = module.npz.load_npz

    def load_npz(file: Any, obj: Any) -> None:
        if not hasattr(file, "read") and tensors.is_tensors(file):
            raise ValueError(
                f"{file} is a file of PyTorch: torchvision's GoogLeNet is another network than "
                "Chainer's, with batch normalization. ResNet and VGG links take such files"
            )
        own(file, obj)

    vars(module)["npz"] = surgery.view(module.npz, load_npz=load_npz)


def _pool_as_torchvision(layers: Any) -> None:
    functions = layers.functions.fget

    def with_its_poolings(self: Any) -> OrderedDict[str, list[Any]]:
        from chainer_compat import torchvision

        found: OrderedDict[str, list[Any]] = functions(self)
        for name, pooling in torchvision.poolings(self).items():
            found[name] = [pooling]
        return found

    layers.functions = property(with_its_poolings)


def _take_torchvisions(module: ModuleType, example: str) -> None:
    def load_npz(file: Any, obj: Any) -> None:
        from chainer_compat import torchvision  # which imports Chainer

        torchvision.load(file, obj)

    vars(module)["npz"] = surgery.view(module.npz, load_npz=load_npz)
    own = module._retrieve

    @surgery.replaces(module, "_retrieve")
    def _retrieve(*args: Any) -> Any:
        try:
            return own(*args)
        except OSError as error:
            error.add_note(
                f"{type(args[-1]).__name__}(pretrained_model=FILE) also takes the weights of "
                f"torchvision, such as {example}, which its page about models names"
            )
            raise
