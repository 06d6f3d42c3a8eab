"""Weights are loaded completely, without the head, or not at all."""

import json
from collections.abc import Iterable
from pathlib import Path

import chainer
import numpy as np
import pytest
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]


@pytest.fixture
def saved(app, tmp_path) -> tuple[Path, Arrays]:
    model, path = app.models.ARCHITECTURES["small"](n_out=7), tmp_path / "weights.npz"
    chainer.serializers.save_npz(path, model)
    with np.load(path) as arrays:
        return path, dict(arrays)


def test_weights_of_another_network_are_named(app, saved):
    path, arrays = saved
    del arrays["bn3/beta"], arrays["bn2/N"]
    arrays["fc/W"] = np.zeros((10, 128), np.float32)
    arrays |= {f"other{i}/W": np.zeros(1) for i in range(7)}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="does not have the weights of small for 7") as caught:
        app.weights.load_network(path, "small", 7)
    assert str(caught.value).partition("classes: ")[2] == (
        "it lacks bn2/N, bn3/beta; it also has other0/W, other1/W, other2/W, other3/W, other4/W "
        "and 2 more; of other shapes are fc/W (10, 128), not (7, 128)"
    )


def test_error_for_a_file_that_is_damaged_or_absent(app, saved):
    path, _ = saved
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    for damaged in (b"", b"weights", content[:middle], flipped):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=r"weights\.npz is (damaged|not an NPZ file)"):
            app.weights.load_network(path, "small", 7)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(OSError, match=r"weights\.npz is not an NPZ file"):
        app.weights.load_network(path, "small", 7)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.npz"):
        app.weights.load_network(path, "small", 7)


@pytest.mark.parametrize(
    ("arch", "head"),
    [
        ("small", {"fc/W", "fc/b"}),
        ("nin", {"mlpconv4/2/W", "mlpconv4/2/b"}),
        ("googlenet", {f"loss{i}/{p}" for i in ("1_fc2", "2_fc2", "3_fc") for p in "Wb"}),
    ],
)
def test_head_is_what_depends_on_the_number_of_classes(app, arch, head, not_drawn):
    assert app.weights.head_of(app.models.ARCHITECTURES[arch]) == head


def test_all_but_the_head(app, saved, drawn_fast):
    path, arrays = saved
    fine_tuned, loaded = app.weights.load_network(path, "small", 3, but={"fc/W", "fc/b"})
    assert loaded == sorted(arrays.keys() - {"fc/W", "fc/b"})
    found = chainer.serializers.npz.serialize(fine_tuned)
    assert (found["fc/W"].shape, found["fc/b"].tolist()) == ((3, 128), [0, 0, 0])
    for name in loaded:
        np.testing.assert_array_equal(found[name], arrays[name], err_msg=name)
    with pytest.raises(ValueError, match=r"of other shapes are fc/W \(7, 128\), not \(3, 128\)"):
        app.weights.load_network(path, "small", 3, but={"fc/b"})
    with pytest.raises(ValueError, match="with another number of classes, add --finetune"):
        app.weights.load_network(path, "small", 3)


def test_values_that_are_not_finite_are_named(app, saved):
    path, arrays = saved
    arrays["bn2/beta"][3], arrays["fc/W"][:] = np.inf, np.nan
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"values that are not finite: bn2/beta, fc/W\."):
        app.weights.load_network(path, "small", 7)
    with pytest.raises(ValueError, match=r"values that are not finite: bn2/beta\."):
        app.weights.load_network(path, "small", 7, but={"fc/W"})


def test_layer_that_does_not_know_its_input_is_loaded(app, tmp_path, monkeypatch, not_drawn):
    class Lazy(chainer.Chain):
        def __init__(self, n_out: int) -> None:
            super().__init__()
            with self.init_scope():
                self.fc = chainer.links.Linear(None, n_out)

    monkeypatch.setitem(app.models.ARCHITECTURES, "lazy", Lazy)
    weights = {"fc/W": np.ones((3, 5), np.float32), "fc/b": np.ones(3, np.float32)}
    np.savez(tmp_path / "lazy.npz", **weights)
    network, _ = app.weights.load_network(tmp_path / "lazy.npz", "lazy", 3)
    np.testing.assert_array_equal(network.fc.W.array, weights["fc/W"])


# Files of PyTorch


@pytest.fixture
def write(app, tmp_path):
    """Return a function that writes a file with these tensors, each a single 0."""

    def call(names: Iterable[str], metadata: dict[str, str] | None = None) -> Path:
        path = tmp_path / "weights.safetensors"
        save_file({name: np.zeros(1, np.float32) for name in names}, path, metadata)
        return path

    return call


def test_what_is_known_of_a_file_of_pytorch(app, write):
    names = app.models.torchvision.NAMES["resnet101"].values()
    colors = {"mean": [123.675, 116.28, 103.53], "deviation": [58.395, 57.12, 57.375]}
    old = [name for name in names if "num_batches_tracked" not in name]
    for present, metadata in ((names, None), (old, {"format": "pt"})):
        with app.weights.open_weights(write(present, metadata)) as found:
            assert found.about.pop("arch") == "resnet101"
            assert found.about == {name: pytest.approx(v) for name, v in colors.items()}
            counter = found.read("bn1/N")
            assert (counter.item(), counter.dtype) == (0, np.int64)
            assert found.shapes.keys() == app.models.torchvision.NAMES["resnet101"].keys()
    own = {"classes": ["ant", "bee"], "mean": [1.5, 2, 3], "deviation": [4, 5, 6]}
    path = write(names, {name: json.dumps(value) for name, value in own.items()})
    with app.weights.open_weights(path) as found:
        assert found.about == {"arch": "resnet101", **own}


NONE_OF = "has the weights of none of torchvision's resnet50, resnet101, resnet152, vgg16: "


@pytest.mark.parametrize(
    ("change", "arch", "message"),
    [
        (lambda n: n, "resnet101", "is of resnet50, not of resnet101: omit --arch"),
        (lambda n: n, "alex", "is of resnet50, not of alex: omit --arch"),
        (lambda n: n, "resnet50", r"of other shapes are bn1\.bias \(1,\), not \(64,\), bn1"),
        (
            lambda n: [f"module.{name}" for name in n],
            None,
            NONE_OF + r"all names begin with 'module\.': save the weights",
        ),
        (
            lambda n: [name for name in n if "conv3" not in name],
            None,
            NONE_OF + r"compared with resnet50, it lacks layer1\.0\.conv3\.weight, ",
        ),
        (
            lambda n: [name for name in n if name.startswith(("layer1", "fc"))],
            None,
            NONE_OF + r"compared with resnet50, it lacks bn1\.bias, ",
        ),
        (
            lambda n: [*n, "model.x"],
            "vgg16",
            NONE_OF + r"compared with vgg16, it lacks classifier\.0\.bias, .* also has bn1\.bias",
        ),
    ],
)
def test_other_files_of_pytorch_are_refused(app, write, not_drawn, change, arch, message):
    path = write(change(app.models.torchvision.NAMES["resnet50"].values()))
    with pytest.raises(ValueError, match=f"weights.safetensors .*{message}"):
        app.weights.load_network(path, arch, 10)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"mean": "[1, 2]"}, "'mean' in its metadata: expected a list of 3, got"),
        ({"classes": "ant"}, "'classes' in its metadata: not JSON"),
        ({"deviation": "[1, 0, 1]"}, "expected deviations above 0, got"),
    ],
)
def test_metadata_that_make_no_sense(app, write, metadata, message):
    right = {"classes": "[]", "mean": "[1, 2, 3]", "deviation": "[1, 2, 3]"}
    path = write(app.models.torchvision.NAMES["resnet50"].values(), right | metadata)
    with pytest.raises(ValueError, match=f"weights.safetensors.*{message}"):
        app.weights.load_network(path, "resnet50", 10)
