"""Chainer's ResNet and VGG links compute what torchvision computes with the same weights."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from PIL import Image

torchvision = pytest.importorskip("torchvision")
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

IMAGE = Image.fromarray(np.random.RandomState(0).randint(0, 256, (250, 300, 3), np.uint8))


NETWORKS = {
    "resnet50": (L.ResNet50Layers, "fc6", torch.save),
    "vgg16": (L.VGG16Layers, "fc8", safetensors_torch.save_file),
    "vgg19": (L.VGG19Layers, "fc8", torch.save),
}


def random_network(name):
    """Return a network whose outputs depend on all of its weights and running statistics."""
    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(weights=None).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1)
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    return network


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("resnet50", "float32"),
        ("resnet50", "float64"),
        ("vgg16", "float64"),
        pytest.param("vgg16", "float32", marks=pytest.mark.nightly),
        pytest.param("vgg19", "float64", marks=pytest.mark.nightly),
    ],
)
def test_links_compute_what_torchvision_computes(name, dtype, tmp_path):
    link_class, last, save = NETWORKS[name]
    network = random_network(name)
    save(network.state_dict(), tmp_path / "weights")
    network.to(getattr(torch, dtype))
    picture = IMAGE.resize((256, 256)).crop((16, 16, 240, 240))
    image = (np.asarray(picture) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    with torch.inference_mode():
        outputs = network(torch.from_numpy(image.transpose(2, 0, 1)[None].astype(dtype)))
        expected = {last: outputs.numpy(), "prob": outputs.softmax(1).numpy()}
    with chainer.using_config("dtype", np.dtype(dtype)), chainer.using_config("train", False):
        link = link_class(tmp_path / "weights")
        with chainer.no_backprop_mode():
            found = link.extract([picture], [last], size=None)
        found["prob"] = link.predict([IMAGE], oversample=False)
    for layer, values in expected.items():
        assert found[layer].dtype == dtype
        difference = abs(found[layer].array - values).max()
        assert difference < {"float32": 1e-5, "float64": 1e-10}[dtype] * abs(values).max()
