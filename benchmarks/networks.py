"""What the networks are made of that are measured, in Chainer and in PyTorch alike."""

from __future__ import annotations

import itertools

INPUT_SHAPES = {"mlp": (784,), "conv": (3, 64, 64), "resnet50": (3, 224, 224)}
TITLES = {"mlp": "MLP 784-1000-1000-10", "conv": "conv net", "resnet50": "ResNet-50"}

MLP_UNITS = (784, 1000, 1000, 10)

#: Of the convolutions of 3x3, after some of which the picture is halved.
CHANNELS = (3, 64, 128, 256, 512, 512, 512)
POOLED = (0, 1, 2, 3, 5)
CLASSES = 256


def conv_parameters() -> int:
    """Return the number of parameters of the conv net."""
    channels = itertools.pairwise(CHANNELS)
    features = CHANNELS[-1] * 4
    linear = (features + 1) * (features + CLASSES)
    return sum((9 * n_in + 1) * n_out for n_in, n_out in channels) + linear


def mlp_parameters() -> int:
    """Return the number of parameters of the perceptron."""
    return sum((n + 1) * m for n, m in itertools.pairwise(MLP_UNITS))


#: Bytes of the gradients. ResNet-50 as in apps/imagenet, with 1000 classes.
GRADIENT_BYTES = {
    "mlp": 4 * mlp_parameters(),
    "conv": 4 * conv_parameters(),
    "resnet50": 4 * 25_557_096,
}
