"""Outputs equal torchvision's, with weights from there, and with weights for there."""

from collections.abc import Iterator

import chainer
import numpy as np
import pytest
from PIL import Image

torchvision = pytest.importorskip("torchvision")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

# torchvision divides vgg16's images of other sizes by adaptive pooling.
SIDES = {"resnet50": 64, "resnet101": 64, "resnet152": 64, "vgg16": 224}


def create(name: str, n_out: int):
    """Return torchvision's network without drawing weights that would be replaced."""
    with torch.device("meta"):
        network = getattr(torchvision.models, name)(num_classes=n_out)
    return network.to_empty(device="cpu").eval()


def draw(network) -> None:
    """Draw weights and running statistics that keep outputs from vanishing or exploding."""
    random = torch.Generator().manual_seed(0)
    for name, value in network.state_dict().items():
        if value.ndim > 1:
            limit = (6 / value[0].numel()) ** 0.5
            value.uniform_(-limit, limit, generator=random)
        elif name.endswith("num_batches_tracked"):
            value.fill_(7)
        elif name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=random)
        elif name.endswith("weight"):
            # The sums of a residual network would grow from block to block.
            value.uniform_(*((0.1, 0.3) if ".bn3." in name else (0.5, 1.5)), generator=random)
        else:
            value.uniform_(-0.3, 0.3, generator=random)


@pytest.fixture
def evaluation(not_drawn) -> Iterator[None]:
    with chainer.using_config("train", False), chainer.no_backprop_mode(), torch.no_grad():
        yield


def images(name: str) -> np.ndarray:
    shape = 2, 3, SIDES[name], SIDES[name]
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.mark.parametrize("name", SIDES)
def test_from_torchvision_and_back(app, name, evaluation, tmp_path):
    """Files of each kind are read alike; export.py's is loaded with ``strict=True``."""
    theirs = create(name, 5)
    draw(theirs)
    x = images(name)
    weights = theirs.state_dict()
    path = tmp_path / "weights"
    torch.save(weights, path)
    network, _ = app.weights.load_network(path, name, 5)
    scores = network(x).array
    assert_near(scores, theirs(torch.from_numpy(x)).numpy(), 1e-5)
    if name == "resnet50":
        torch.save(weights, path, _use_new_zipfile_serialization=False)
        assert_near(app.weights.load_network(path, name, 5)[0](x).array, scores, 0)
        safetensors.torch.save_file(weights, path)
        assert_near(app.weights.load_network(path, name, 5)[0](x).array, scores, 0)

    about = {"arch": name, "classes": list("abcde"), **app.models.torchvision.COLORS}
    recognizer = app.trained.Recognizer(network, about["mean"], about["deviation"])
    path.write_bytes(app.export.to_tensors(app.trained.Trained(recognizer, about)))
    again = create(name, 5)
    again.load_state_dict(safetensors.torch.load_file(path), strict=True)
    for key, value in again.state_dict().items():
        assert torch.equal(value, weights[key]), key

    with chainer.using_config("dtype", np.float64):
        network, _ = app.weights.load_network(path, name, 5)
    expected = theirs.double()(torch.from_numpy(x).double()).numpy()
    assert_near(network(x.astype(np.float64)).array, expected, 1e-10)


def test_fine_tuned_network_runs_in_torchvision(app, drawn_fast, tmp_path):
    """With the lines that are printed, probabilities equal those of predict.py."""
    theirs = create("resnet50", 5)
    draw(theirs)
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    head = app.weights.head_of(app.models.ARCHITECTURES["resnet50"])
    network, _ = app.weights.load_network(path, "resnet50", 3, head)
    model = app.training.Classifier(network)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    optimizer.update(model, images("resnet50"), np.array([1, 2], np.int32))

    with app.weights.open_weights(path) as found:
        about = {**found.about, "classes": ["ant", "bee", "cow"], "insize": 56}
    recognizer = app.trained.Recognizer(network, about["mean"], about["deviation"])
    trained = app.trained.Trained(recognizer, about)
    exported = tmp_path / "model.safetensors"
    exported.write_bytes(app.export.to_tensors(trained))
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    picture = tmp_path / "picture.png"  # both crop it at the same pixels, without scaling
    Image.fromarray(pixels).save(picture)
    names = {}
    exec("\n".join(app.export.how_to_load(trained, exported)), names)
    with torch.no_grad():
        scores = names["model"](names["prepare"](Image.open(picture))[None])
    [(_, image)] = app.predict.read_images([picture], trained.insize, 1)
    assert_near(trained.shares(image[None]), scores.softmax(dim=1).numpy(), 1e-5)
