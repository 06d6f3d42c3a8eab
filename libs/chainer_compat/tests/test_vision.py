"""Chainer's ResNet and VGG links compute what torchvision's networks do with its weights.

The networks here have an eighth of the channels. ``test_torchvision.py`` compares whole ones with
torchvision itself.
"""

import copy
import io
import pickle

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.dataset import download, get_dataset_root, set_dataset_root
from chainer.links.model.vision import resnet, vgg
from chainer.serializers import load_npz, save_npz
from PIL import Image
from safetensors.numpy import save_file

RANDOM = np.random.default_rng(0)
IMAGE = Image.fromarray(RANDOM.integers(0, 256, (64, 80, 3), np.uint8))
MIDDLE = IMAGE.resize((256, 256)).crop((16, 16, 240, 240))  # which `predict` looks at
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def narrow(link_class):
    """Return a function that makes a link with an eighth of the channels, except of images."""

    def make(*sizes, **kwargs):
        channels, others = sizes[:2], sizes[2:]
        return link_class(*(max(n // 8, 3) for n in channels), *others, **kwargs)

    return make


@pytest.fixture(autouse=True)
def narrow_networks(monkeypatch):
    for module in (resnet, vgg):
        for name in {"Convolution2D", "BatchNormalization", "Linear"} & vars(module).keys():
            monkeypatch.setattr(module, name, narrow(getattr(L, name)))


@pytest.fixture(autouse=True)
def in_float64():
    with (
        chainer.using_config("dtype", np.dtype("d")),
        chainer.using_config("train", False),
        chainer.no_backprop_mode(),
    ):
        yield


def layer(name, *shape):
    scale = (2 / np.prod(shape[1:])) ** 0.5
    return {
        f"{name}.weight": RANDOM.normal(0, scale, shape),
        f"{name}.bias": RANDOM.normal(0, 0.1, shape[0]),
    }


def convolution_and_normalization(convolution, normalization, *shape):
    (n, *_) = shape
    return {
        f"{convolution}.weight": layer("", *shape)[".weight"],
        f"{normalization}.weight": RANDOM.uniform(0.5, 1, n),
        f"{normalization}.bias": RANDOM.normal(0, 0.1, n),
        f"{normalization}.running_mean": RANDOM.normal(0, 0.1, n),
        f"{normalization}.running_var": RANDOM.uniform(0.5, 2, n),
        f"{normalization}.num_batches_tracked": np.array(7),
    }


def resnet_weights(blocks):
    """Return random weights in the names of torchvision's ResNet."""
    weights = convolution_and_normalization("conv1", "bn1", 8, 3, 7, 7)
    n_in = 8
    for stage, count in enumerate(blocks, 1):
        n = 4 * 2**stage
        for i in range(count):
            block = f"layer{stage}.{i}"
            convolutions = {"1": (n, n_in, 1, 1), "2": (n, n, 3, 3), "3": (4 * n, n, 1, 1)}
            for k, shape in convolutions.items():
                weights |= convolution_and_normalization(
                    f"{block}.conv{k}", f"{block}.bn{k}", *shape
                )
            if i == 0:
                weights |= convolution_and_normalization(
                    f"{block}.downsample.0", f"{block}.downsample.1", 4 * n, n_in, 1, 1
                )
            n_in = 4 * n
    return weights | layer("fc", 125, 256)


def resnet_outputs(weights, blocks, x):
    """Return what torchvision's ResNet computes, by the names of Chainer's layers."""

    def convolve(x, convolution, normalization, stride=1, pad=0):
        y = F.convolution_2d(x, weights[f"{convolution}.weight"], stride=stride, pad=pad)
        values = (
            weights[f"{normalization}.{name}"]
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        return F.fixed_batch_normalization(y, *values, eps=1e-5)

    found = {"conv1": F.relu(convolve(x, "conv1", "bn1", 2, 3))}
    x = found["pool1"] = F.max_pooling_2d(found["conv1"], 3, 2, 1, cover_all=False)
    for stage, count in enumerate(blocks, 1):
        for i in range(count):
            block, stride = f"layer{stage}.{i}", 2 if i == 0 and stage > 1 else 1
            y = F.relu(convolve(x, f"{block}.conv1", f"{block}.bn1"))
            y = F.relu(convolve(y, f"{block}.conv2", f"{block}.bn2", stride, 1))
            y = convolve(y, f"{block}.conv3", f"{block}.bn3")
            if i == 0:
                x = convolve(x, f"{block}.downsample.0", f"{block}.downsample.1", stride)
            x = F.relu(x + y)
        found[f"res{stage + 1}"] = x
    found["pool5"] = F.mean(x, axis=(2, 3))
    found["fc6"] = F.linear(found["pool5"], weights["fc.weight"], weights["fc.bias"])
    found["prob"] = F.softmax(found["fc6"])
    return found


# Positions of the convolutions among the layers of torchvision's VGG, and their channels.
VGG_16 = dict(
    zip(
        (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
        (8, 8, 16, 16, *[32] * 3, *[64] * 6),
        strict=True,
    )
)
VGG_19 = dict(
    zip(
        (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34),
        (8, 8, 16, 16, *[32] * 4, *[64] * 8),
        strict=True,
    )
)


def vgg_weights(convolutions):
    """Return random weights in the names of torchvision's VGG."""
    weights, n_in = {}, 3
    for position, n in convolutions.items():
        weights |= layer(f"features.{position}", n, n_in, 3, 3)
        n_in = n
    for position, shape in {0: (512, 49 * 64), 3: (512, 512), 6: (125, 512)}.items():
        weights |= layer(f"classifier.{position}", *shape)
    return weights


def vgg_outputs(weights, convolutions, x):
    """Return what torchvision's VGG computes, by the names of Chainer's layers."""
    for position in range(max(convolutions) + 3):
        values = [weights.get(f"features.{position}.{name}") for name in ("weight", "bias")]
        if position in convolutions:
            x = F.relu(F.convolution_2d(x, *values, pad=1))
        elif position - 1 not in convolutions:  # that is its ReLU
            x = F.max_pooling_2d(x, 2, 2, cover_all=False)
    found = {"pool5": x}
    if x.shape[2:] != (7, 7):
        return found
    for name, position in {"fc6": 0, "fc7": 3, "fc8": 6}.items():
        values = [weights[f"classifier.{position}.{value}"] for value in ("weight", "bias")]
        x = found[name] = F.linear(x, *values)
        if name != "fc8":
            x = found[name] = F.relu(x)
    found["prob"] = F.softmax(x)
    return found


def normalized(image):
    """Prepare an image as torchvision's documentation says."""
    x = (np.asarray(image) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return x.transpose(2, 0, 1)[None]


def assert_close(found, expected, tolerance=1e-10):
    assert found.shape == expected.shape
    assert abs(found.array - expected.array).max() < tolerance * abs(expected.array).max()


def assert_computes(link, outputs, x):
    found = link(x, list(outputs))
    for name, expected in outputs.items():
        assert_close(found[name], expected)


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    """Return a file with weights of ResNet-50, and the weights."""
    path, weights = tmp_path_factory.mktemp("weights") / "file", resnet_weights(BLOCKS[50])
    save_file(weights, path)
    return str(path), weights


@pytest.fixture(scope="module")
def vgg16(tmp_path_factory):
    """Return a file with weights of VGG-16, and the weights."""
    path, weights = tmp_path_factory.mktemp("weights") / "vgg16.pth", vgg_weights(VGG_16)
    save_file(weights, path)
    return str(path), weights


@pytest.mark.parametrize("n_layers", BLOCKS)
def test_resnet(n_layers, tmp_path):
    blocks = BLOCKS[n_layers]
    weights = resnet_weights(blocks)
    save_file(weights, tmp_path / "weights")
    link = getattr(L, f"ResNet{n_layers}Layers")(tmp_path / "weights")
    outputs = resnet_outputs(weights, blocks, normalized(IMAGE))
    assert link.available_layers == list(outputs)
    assert_computes(link, outputs, resnet.prepare(IMAGE, size=None)[None])


def test_vgg16(vgg16):
    path, weights = vgg16
    outputs = vgg_outputs(weights, VGG_16, normalized(MIDDLE))
    assert_computes(L.VGG16Layers(path), outputs, vgg.prepare(MIDDLE, size=None)[None])


def test_vgg19(tmp_path):
    weights = vgg_weights(VGG_19)
    save_file(weights, tmp_path / "weights")
    outputs = vgg_outputs(weights, VGG_19, normalized(MIDDLE))
    link = L.VGG19Layers(tmp_path / "weights")
    assert_computes(link, outputs, vgg.prepare(MIDDLE, size=None)[None])


def test_vgg_leaves_out_the_last_pixel_of_an_odd_side(vgg16):
    path, weights = vgg16
    found = L.VGG16Layers(path).extract([IMAGE], ["pool5"], size=(100, 70))["pool5"]
    x = normalized(IMAGE.resize((100, 70)))
    assert_close(found, vgg_outputs(weights, VGG_16, x)["pool5"])


def test_pictures(resnet50):
    path, weights = resnet50
    link = L.ResNet50Layers(path)
    outputs = resnet_outputs(weights, BLOCKS[50], normalized(MIDDLE))
    assert_close(link.predict([IMAGE], oversample=False), outputs["prob"])
    found = link.extract([IMAGE], ["pool1"], size=(96, 32))["pool1"]
    x = normalized(IMAGE.resize((96, 32)))
    assert_close(found, resnet_outputs(weights, BLOCKS[50], x)["pool1"])


def test_npz_of_resnet(resnet50, tmp_path):
    path, weights = resnet50
    save_npz(tmp_path / "mine.npz", L.ResNet50Layers(path), compression=False)
    again = L.ResNet50Layers(tmp_path / "mine.npz", downsample_fb=True)
    outputs = resnet_outputs(weights, BLOCKS[50], normalized(IMAGE))
    assert_computes(again, outputs, resnet.prepare(IMAGE, size=None)[None])
    with pytest.raises(KeyError, match=r"conv1/[Wb] is not a file in the archive"):
        load_npz(tmp_path / "mine.npz", L.ResNet50Layers(None))


def test_npz_of_vgg(vgg16, tmp_path):
    path, weights = vgg16
    save_npz(tmp_path / "mine.npz", L.VGG16Layers(path), compression=False)
    outputs = vgg_outputs(weights, VGG_16, normalized(MIDDLE))
    again = L.VGG16Layers(str(tmp_path / "mine.npz"))
    assert_computes(again, outputs, vgg.prepare(MIDDLE, size=None)[None])
    with pytest.raises(KeyError, match=r"conv1_1/[Wb] is not a file in the archive"):
        load_npz(tmp_path / "mine.npz", L.VGG16Layers(None))


@pytest.mark.parametrize(
    "same",
    [copy.deepcopy, lambda link: link.copy("copy"), lambda link: pickle.loads(pickle.dumps(link))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_compute_the_same(same, resnet50):
    link = L.ResNet50Layers(resnet50[0])
    x = resnet.prepare(IMAGE, size=None)[None]
    assert (same(link)(x)["prob"].array == link(x)["prob"].array).all()


def test_mixed16(vgg16):
    path, weights = vgg16
    with chainer.using_config("dtype", chainer.mixed16):
        found = L.VGG16Layers(path).extract([IMAGE], ["conv1_1"], size=None)["conv1_1"]
    assert found.dtype == np.float16
    values = weights["features.0.weight"], weights["features.0.bias"]
    expected = F.relu(F.convolution_2d(normalized(IMAGE), *values, pad=1))
    assert_close(F.cast(found, "d"), expected, 2e-3)


def test_npz_files_of_chainers_own_links_load_as_before(tmp_path):
    own = L.VGG16Layers(None)
    save_npz(tmp_path / "own.npz", own, compression=False)
    content = io.BytesIO((tmp_path / "own.npz").read_bytes())
    for file in (tmp_path / "own.npz", str(tmp_path / "own.npz"), content):
        link = L.VGG16Layers(file)
        assert type(link.conv1_1) is L.Convolution2D
        assert (link.conv1_1.W.array == own.conv1_1.W.array).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"features.0.weight": None},
            r"the first of 1 .* 'features.0.weight': expected shape \(8, 3, 3, 3\), got none",
        ),
        (
            {"features.1.weight": np.ones(8)},  # VGG with batch normalization
            r"the first of 1 .* 'features.1.weight': expected none, got shape \(8,\)",
        ),
        (
            layer("classifier.6", 7, 512),
            r"first of 2 .* 'classifier.6.weight': .* \(125, 512\), got shape \(7, 512\)",
        ),
        (
            {"features.28.bias": np.full(64, np.inf)},
            "'features.28.bias' has values that are not finite$",
        ),
        (
            {"classifier.0.bias": np.full(512, np.nan)},
            "not finite. torchvision's vgg16_features-.* has only the convolutions",
        ),
    ],
)
def test_weights_of_other_networks_are_refused(change, message, vgg16, tmp_path):
    weights = {name: value for name, value in (vgg16[1] | change).items() if value is not None}
    save_file(weights, tmp_path / "weights")
    with pytest.raises(ValueError, match=f"^{tmp_path}/weights: .*{message}"):
        L.VGG16Layers(tmp_path / "weights")


@pytest.mark.parametrize("make", [L.ResNet50Layers, L.VGG16Layers])
def test_where_caffe_models_are_missing_torchvisions_are_named(make, tmp_path, monkeypatch):
    def cached_download(url):
        raise OSError(f"{url} is gone")

    monkeypatch.setattr(download, "cached_download", cached_download)
    before = get_dataset_root()
    set_dataset_root(str(tmp_path))
    try:
        with pytest.raises(OSError) as caught:
            make()
    finally:
        set_dataset_root(before)
    (note,) = caught.value.__notes__
    assert note.startswith(f"{make.__name__}(pretrained_model=FILE) also takes the weights of")
