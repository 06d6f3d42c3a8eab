"""The names that torchvision gives to the weights of the networks that are the same there.

References: torchvision's ``models/resnet.py`` and ``models/vgg.py``.
"""

from models.resnet import ResNet50, ResNet101, ResNet152
from models.vgg16 import STAGES

# Mean and deviation of red, green and blue, from 0 to 255, of the images that it trained with.
COLORS = {
    "mean": [255 * value for value in (0.485, 0.456, 0.406)],
    "deviation": [255 * value for value in (0.229, 0.224, 0.225)],
}
COUNTER = "num_batches_tracked"  # files from before PyTorch 0.4.1 do not have it

_LAYER = {"W": "weight", "b": "bias"}
_NORMALIZATION = {
    "gamma": "weight",
    "beta": "bias",
    "avg_mean": "running_mean",
    "avg_var": "running_var",
    "N": COUNTER,
}


def _arrays(own: str, other: str, kinds: dict[str, str]) -> dict[str, str]:
    return {f"{own}/{kind}": f"{other}.{name}" for kind, name in kinds.items()}


def _resnet(blocks: tuple[int, ...]) -> dict[str, str]:
    convolution = {"W": "weight"}
    names = _arrays("conv1", "conv1", convolution) | _arrays("bn1", "bn1", _NORMALIZATION)
    for stage, n in enumerate(blocks, 1):
        for block in range(n):
            own, other = f"res{stage + 1}/{block}/", f"layer{stage}.{block}."
            places = {i: (f"conv{i}", f"bn{i}") for i in (1, 2, 3)}
            if block == 0:
                places[4] = "downsample.0", "downsample.1"
            for i, (conv, bn) in places.items():
                names |= _arrays(f"{own}conv{i}", f"{other}{conv}", convolution)
                names |= _arrays(f"{own}bn{i}", f"{other}{bn}", _NORMALIZATION)
    return names | _arrays("fc", "fc", _LAYER)


def _vgg() -> dict[str, str]:
    names: dict[str, str] = {}
    place = 0
    for stage, widths in enumerate(STAGES):
        for i in range(len(widths)):
            names |= _arrays(f"stages/{stage}/{i}", f"features.{place}", _LAYER)
            place += 2  # the next is ReLU
        place += 1  # pooling
    for own, place in (("fc6", 0), ("fc7", 3), ("fc8", 6)):
        names |= _arrays(own, f"classifier.{place}", _LAYER)
    return names


# Of each network: its names here, and those in torchvision.
NAMES = {
    "resnet50": _resnet(ResNet50.blocks),
    "resnet101": _resnet(ResNet101.blocks),
    "resnet152": _resnet(ResNet152.blocks),
    "vgg16": _vgg(),
}
