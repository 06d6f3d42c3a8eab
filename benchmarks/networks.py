"""Sizes of the measured networks, and the time that a link takes for their gradients."""

from __future__ import annotations

import itertools

INPUT_SHAPES = {"digits": (64,), "mlp": (784,), "conv": (3, 64, 64), "resnet50": (3, 224, 224)}
#: Examples in a batch. An iteration on a CPU then takes at most about a second.
BATCHES = {"mlp": 100, "conv": 8, "resnet50": 2}
TITLES = {
    "digits": "MLP 64-200-200-10",
    "mlp": "MLP 784-1000-1000-10",
    "conv": "conv net",
    "resnet50": "ResNet-50",
}
SINGLE, MIXED = "float32", "mixed precision"

DIGITS_UNITS, MLP_UNITS = (64, 200, 200, 10), (784, 1000, 1000, 10)
#: Ten million parameters, and the number of iterations between two snapshots.
SNAPSHOT_UNITS, ITERATIONS = (784, 2800, 2800, 10), 20

#: Channels of the 3x3 convolutions, and the convolutions that pooling follows.
CHANNELS = (3, 64, 128, 256, 512, 512, 512)
POOLED = (0, 1, 2, 3, 5)
CLASSES = 256

# An interface counts 1514 bytes per Ethernet frame. TCP with time stamps carries 1448 of them.
_LINK_BYTES_PER_SECOND = 1e9 / 8 * 1448 / 1514


def conv_parameters() -> int:
    """Return the number of parameters of the convolutional network."""
    channels = itertools.pairwise(CHANNELS)
    features = CHANNELS[-1] * 4
    linear = (features + 1) * (features + CLASSES)
    return sum((9 * n_in + 1) * n_out for n_in, n_out in channels) + linear


def mlp_parameters() -> int:
    """Return the number of parameters of the perceptron."""
    return sum((n + 1) * m for n, m in itertools.pairwise(MLP_UNITS))


#: Bytes of the gradients. ResNet-50 as in Chainer's ImageNet example, with 1000 classes.
GRADIENT_BYTES = {
    "mlp": 4 * mlp_parameters(),
    "conv": 4 * conv_parameters(),
    "resnet50": 4 * 25_557_096,
}


def link_seconds(n_bytes: float, hosts: int) -> float:
    """Return the least time of an all-reduce of ``n_bytes`` between hosts at 1 Gbit/s.

    Each host has to send 2 (N - 1) / N times the bytes (Patarasuk and Yuan, J. Parallel Distrib.
    Comput. 69, 2009).
    """
    return 2 * (hosts - 1) / hosts * n_bytes / _LINK_BYTES_PER_SECOND
