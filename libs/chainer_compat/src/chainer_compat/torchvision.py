"""Chainer's ResNet and VGG links with torchvision's weights.

torchvision's networks differ from Chainer's in what these links hard-code: the colors that they
see, how they pool images whose sides are odd and, of a ResNet, the strides, the margins of the
first pooling and the eps of batch normalization.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any

import chainer.functions as F
import chainer.links as L
import numpy
from chainer.links.model.vision.resnet import ResNetLayers
from chainer.serializers import NpzDeserializer

from chainer_compat.npz import open_npz
from chainer_compat.tensors import is_tensors, open_tensors

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green, blue from 0 to 1
# What `prepare` of Chainer's modules subtracts from blue, green, red from 0 to 255.
_SUBTRACTED_RESNET, _SUBTRACTED_VGG = (103.063, 115.903, 123.152), (103.939, 116.779, 123.68)
_VGG_FEATURES = (
    ". torchvision's vgg16_features-*.pth has only the convolutions: use vgg16-*.pth instead"
)
_FOLDER = "torchvision"  # of the first convolution's values in files
_ATTRIBUTES = {
    "W": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "avg_mean": "running_mean",
    "avg_var": "running_var",
}


class FirstConvolution(L.Convolution2D):
    """A first convolution that sees images as torchvision prepares them.

    It takes them as `prepare` of Chainer's modules returns them. Its values have names of their
    own in files, so neither network loads a file of the other.

    Parameters
    ----------
    like : chainer.links.Convolution2D
        Layer with the same shapes, stride and padding.
    nobias : bool
        Whether it has no bias.
    subtracted : tuple of float
        What `prepare` subtracts from blue, green and red.
    """

    def __init__(
        self, like: L.Convolution2D, nobias: bool, subtracted: tuple[float, float, float]
    ) -> None:
        n_out, n_in, *size = like.W.shape
        super().__init__(n_in, n_out, size, like.stride, like.pad, nobias, initialW=0)
        self._subtracted = subtracted

    def serialize(self, serializer: Any) -> None:
        """Save or load the values under the link's name and ``torchvision/``."""
        super().serialize(serializer[_FOLDER])

    def forward(self, x: Any) -> Any:
        """Normalize images, and convolve them.

        Parameters
        ----------
        x : Variable or array
            Images of shape (N, 3, height, width), as `prepare` returns them.

        Returns
        -------
        Variable
            Their convolution.
        """
        channels = reversed(F.split_axis(x, 3, axis=1))
        offsets = reversed(self._subtracted)
        normalized = [
            (channel + (offset - 255 * mean)) / (255 * std)
            for channel, offset, mean, std in zip(channels, offsets, _MEAN, _STD, strict=True)
        ]
        return super().forward(F.concat(normalized, axis=1))


def load(file: str | os.PathLike[str] | IO[bytes], model: Any) -> None:
    """Load weights into a new link, and make it compute what their network computes.

    Parameters
    ----------
    file : path or file
        File of torchvision; or NPZ file of Chainer's link, with weights of any origin.
    model : ResNetLayers or VGGLayers
        Link as its class has made it.

    Raises
    ------
    ValueError
        If it is a file of PyTorch with another network, or with values that are not finite.
    KeyError, ShapeError
        If it is an NPZ file of another network.
    OSError
        If the file is damaged, is not safe, or cannot be read.
    """
    if not hasattr(file, "read") and is_tensors(file):
        _become_torchvisions(model)
        _load_tensors(file, model)
        return
    with open_npz(file) as arrays:
        if f"{_first(model)}/{_FOLDER}/W" in arrays:
            _become_torchvisions(model)
        NpzDeserializer(arrays).load(model)


def poolings(model: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the poolings of a link that differ from Chainer's, by the names of their layers.

    There are none unless the link computes what torchvision's computes.
    """
    if not isinstance(model[_first(model)], FirstConvolution):
        return {}
    if isinstance(model, ResNetLayers):
        pool = partial(F.max_pooling_2d, ksize=3, stride=2, pad=1, cover_all=False)
        return {"pool1": pool}
    pool = partial(F.max_pooling_2d, ksize=2, cover_all=False)
    return {f"pool{i}": pool for i in range(1, 6)}


def _first(model: Any) -> str:
    return "conv1" if isinstance(model, ResNetLayers) else "conv1_1"


def _become_torchvisions(model: Any) -> None:
    is_resnet, name = isinstance(model, ResNetLayers), _first(model)
    subtracted = _SUBTRACTED_RESNET if is_resnet else _SUBTRACTED_VGG
    first = FirstConvolution(model[name], is_resnet, subtracted)
    delattr(model, name)
    with model.init_scope():
        setattr(model, name, first)
    if is_resnet:
        for block in (model.res2.a, model.res3.a, model.res4.a, model.res5.a):
            block.conv1.stride, block.conv2.stride = (1, 1), block.conv4.stride
        for link in model.links():
            if isinstance(link, L.BatchNormalization):
                link.eps = 1e-5


def _load_tensors(file: str | os.PathLike[str], model: Any) -> None:
    name, kind = os.fspath(file), type(model).__name__
    arrays = {
        f"{layer}.{value}": getattr(found, "array", found)
        for layer, link in (_resnet if isinstance(model, ResNetLayers) else _vgg)(model)
        for attribute, value in _ATTRIBUTES.items()
        if (found := getattr(link, attribute, None)) is not None
    }
    with open_tensors(file) as tensors:
        expected = {key: array.shape for key, array in arrays.items()}
        saved = {
            key: shape
            for key, shape in tensors.shapes.items()
            if not key.endswith(".num_batches_tracked")
        }
        others = [key for key in expected | saved if expected.get(key) != saved.get(key)]
        if others:
            key = others[0]
            raise ValueError(
                f"{name}: expected the weights of torchvision's network of {kind}, with 1000 "
                f"classes; the first of {len(others)} differences is {key!r}: "
                f"expected {_described(expected.get(key))}, got {_described(saved.get(key))}"
            )
        for key, array in arrays.items():
            array[...] = tensors[key]
            if not numpy.isfinite(array).all():
                raise ValueError(
                    f"{name}: {key!r} has values that are not finite"
                    + _VGG_FEATURES * key.startswith("classifier.")
                )


def _described(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"shape {shape}"


def _resnet(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the links with values, and their names in torchvision's network."""
    yield from (("conv1", model.conv1), ("bn1", model.bn1), ("fc", model.fc6))
    renamed = {"conv4": "downsample.0", "bn4": "downsample.1"}
    for stage, blocks in enumerate((model.res2, model.res3, model.res4, model.res5), 1):
        for index in range(len(list(blocks.children()))):
            for link in blocks[f"b{index}" if index else "a"].children():
                yield f"layer{stage}.{index}.{renamed.get(link.name, link.name)}", link


def _vgg(model: Any) -> Iterator[tuple[str, Any]]:
    convolutions = sorted(link.name for link in model.children() if link.name[:4] == "conv")
    for i, name in enumerate(convolutions):
        n_poolings = int(name[4]) - 1  # before it, beside i convolutions with a ReLU each
        yield f"features.{2 * i + n_poolings}", model[name]
    yield from (
        ("classifier.0", model.fc6),
        ("classifier.3", model.fc7),
        ("classifier.6", model.fc8),
    )
