"""The networks, by their names for ``--arch``.

Each is a chain for ``n_out`` classes, with an attribute ``insize``, the height and width in pixels
of the images it was designed for. ``forward`` takes images of shape (batch, 3, insize, insize) and
returns the scores of the classes, of shape (batch, classes), before the softmax. Networks with
auxiliary classifiers return a tuple of three such scores while they are trained, those of the
network itself first. Names and computation of all except `Small` and `VGG16` are those of
Chainer's ImageNet example, so its weights load.
"""

from models.alex import Alex
from models.googlenet import GoogLeNet
from models.googlenetbn import GoogLeNetBN
from models.nin import NIN
from models.resnet50 import ResNet50
from models.small import Small
from models.vgg16 import VGG16

ARCHITECTURES = {
    "alex": Alex,
    "googlenet": GoogLeNet,
    "googlenetbn": GoogLeNetBN,
    "nin": NIN,
    "resnet50": ResNet50,
    "small": Small,
    "vgg16": VGG16,
}
