"""Results of ONNX Runtime on the files that export.py writes, and the names for torchvision."""

import json
import sys
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

MEAN, DEVIATION = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]


def untrained(app, arch: str, n_classes: int, seed: int = 0):
    np.random.seed(seed)
    architecture = app.models.ARCHITECTURES[arch]
    recognizer = app.trained.Recognizer(architecture(n_classes), MEAN, DEVIATION)
    names = [f"class {i}" for i in range(n_classes)]
    about = {"arch": arch, "insize": architecture.insize, "classes": names}
    return app.trained.Trained(recognizer, about | {"mean": MEAN, "deviation": DEVIATION})


NIGHTLY = [
    pytest.param(name, marks=pytest.mark.nightly)
    for name in ("alex", "googlenetbn", "nin", "resnet50", "resnet101", "resnet152", "vgg16")
]


@pytest.mark.parametrize("arch", ["googlenet", "small", *NIGHTLY])
def test_same_shares_as_chainer(app, arch, drawn_fast):
    model = untrained(app, arch, 7)
    content = app.export.export(model)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (images,), (shares,) = session.get_inputs(), session.get_outputs()
    assert images.shape == ["batch", 3, model.insize, model.insize]
    assert shares.shape == ["batch", 7]
    names = session.get_modelmeta().custom_metadata_map["classes"]
    assert json.loads(names) == model.classes

    to_batch = app.data.ToBatch(MEAN, DEVIATION)
    for n in (1, 3):
        pixels = np.random.default_rng(n).integers(0, 256, (n, *images.shape[1:]), np.uint8)
        x, _ = to_batch([(image, np.int32(0)) for image in pixels])
        with chainer.using_config("train", False):
            expected = F.softmax(model.recognizer.network(x)).array
        (found,) = session.run(None, {"images": pixels.astype(np.float32)})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_other_results_are_noticed(app):
    content = app.export.export(untrained(app, "small", 7))
    with pytest.raises(ValueError, match="ONNX Runtime computes"):
        app.export.compare(untrained(app, "small", 7, seed=1), content)


@pytest.fixture
def export(app, tmp_path, monkeypatch, capsys):
    """Return a function that runs export.py beside a network, and returns what it prints."""
    (tmp_path / "result").mkdir()
    known = {"arch": "small", "insize": 48, "classes": ["ant", "bee"]}
    known |= {"mean": MEAN, "deviation": DEVIATION}
    (tmp_path / "result" / "model.json").write_text(json.dumps(known))
    network = untrained(app, "small", 2).recognizer.network
    chainer.serializers.save_npz(tmp_path / "result" / "best.npz", network)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        app.export.main(arguments)
        return capsys.readouterr().out

    return run


def test_command(export):
    first, second = export().splitlines()
    assert first.startswith(f"written: {Path('model.onnx').resolve()} (")
    assert second.startswith("ONNX Runtime computes the same as Chainer, up to ")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape == ["batch", 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "missing/best.npz"], "no trained network missing/best.npz: train first, .*"),
        (["--out", "missing/model.onnx"], "No such file or directory: 'missing/model.onnx'"),
        (
            ["--format", "safetensors"],
            "one of torchvision's resnet50, resnet101, resnet152, vgg16, got small: use .* onnx",
        ),
    ],
)
def test_wrong_input_gives_one_line(export, arguments, message):
    with pytest.raises(SystemExit, match=rf"\Aerror: .*{message}\Z"):
        export(*arguments)


@pytest.mark.parametrize(
    ("kind", "missing", "install"),
    [("onnx", "onnxruntime", "onnx onnxruntime"), ("safetensors", "safetensors", "safetensors")],
)
def test_error_without_a_package(export, monkeypatch, kind, missing, install):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"error: .*{missing}.*: pip install {install}\Z"):
        export("--format", kind)


def test_weights_for_torchvision(app, export, shallow):
    model = untrained(app, "resnet50", 2)
    network = model.recognizer.network
    chainer.serializers.save_npz("result/best.npz", network, compression=False)
    Path("result/model.json").write_text(json.dumps(model.about))
    assert app.export.parse_arguments(["--format", "safetensors"]).out == Path("model.safetensors")
    assert export("--out", "model.safetensors").splitlines()[1:] == [
        "import safetensors.torch, torchvision",
        "from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor",
        "model = torchvision.models.resnet50(num_classes=2)",
        "model.load_state_dict(safetensors.torch.load_file('model.safetensors'))",
        "model.eval()",
        "prepare = Compose([Resize(37), CenterCrop(32), ToTensor(), "
        "Normalize([0.4705882, 0.4313725, 0.3921569], [0.2352941, 0.1960784, 0.1568627])])",
    ]
    found = load_file("model.safetensors")
    assert len(found) == len(chainer.serializers.npz.serialize(network))
    weight = network.res2[0].conv4.W.array
    np.testing.assert_array_equal(found["layer1.0.downsample.0.weight"], weight)
    np.testing.assert_array_equal(found["layer4.0.bn3.running_var"], network.res5[0].bn3.avg_var)
    counters = {name for name in found if name.endswith("num_batches_tracked")}
    assert {found[name].dtype for name in counters} == {np.dtype(np.int64)}
    assert {found[name].dtype for name in found.keys() - counters} == {np.dtype(np.float32)}
    assert {found[name].shape for name in counters} == {()}
    again = app.trained.load(Path("model.safetensors"))
    assert again.about == {**model.about, "insize": 32}
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal(again.shares(images), model.shares(images))


def test_chainers_resnet_is_not_for_torchvision(app, not_drawn):
    model = untrained(app, "resnet50", 2)
    model.recognizer.network = app.models.create("resnet50", 2, ["conv1/b"])
    with pytest.raises(ValueError, match=r"got Chainer's ResNet-50, which computes something els"):
        app.export.to_tensors(model)
