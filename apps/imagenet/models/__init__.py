"""The networks, by their names for ``--arch``.

Each is a chain for ``n_out`` classes, with an attribute ``insize``, the height and width in pixels
of the images it was designed for. ``forward`` takes images of shape (batch, 3, insize, insize) and
returns the scores of the classes, of shape (batch, classes), before the softmax. Networks with
auxiliary classifiers return a tuple of three such scores while they are trained, those of the
network itself first. AlexNet, GoogLeNet and NIN have the names of Chainer's ImageNet example, and
compute as there, so its weights load. `ResNet50`, its larger kin and `VGG16` compute as in
torchvision; `torchvision` translates its names. Chainer's ResNet-50 is another network with nearly
the same names, see `create`.
"""

from collections.abc import Container

import chainer

from models.alex import Alex
from models.googlenet import GoogLeNet
from models.googlenetbn import GoogLeNetBN
from models.nin import NIN
from models.resnet import ChainersResNet50, ResNet50, ResNet101, ResNet152
from models.small import Small
from models.vgg16 import VGG16

ARCHITECTURES = {
    "alex": Alex,
    "googlenet": GoogLeNet,
    "googlenetbn": GoogLeNetBN,
    "nin": NIN,
    "resnet50": ResNet50,
    "resnet101": ResNet101,
    "resnet152": ResNet152,
    "small": Small,
    "vgg16": VGG16,
}


def create(arch: str, n_out: int, names: Container[str] = ()) -> chainer.Link:
    """Return a network that computes as the one that its weights are of.

    Parameters
    ----------
    arch : str
    n_out : int
        Number of classes.
    names : container of str
        Names of the weights that it will get; by default, it is new.
    """
    # Torchvision's first convolution has no bias, and all else that differs has no names.
    if arch == "resnet50" and "conv1/b" in names:
        return ChainersResNet50(n_out)
    return ARCHITECTURES[arch](n_out)
