"""Results of ONNX Runtime on the files that export.py writes, for every network."""

import json
import sys
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

MEAN, DEVIATION = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]


def untrained(app, arch: str, n_classes: int, seed: int = 0):
    np.random.seed(seed)
    architecture = app.models.ARCHITECTURES[arch]
    recognizer = app.trained.Recognizer(architecture(n_classes), MEAN, DEVIATION)
    names = [f"class {i}" for i in range(n_classes)]
    return app.trained.Trained(recognizer, architecture.insize, names)


NIGHTLY = [
    pytest.param(name, marks=pytest.mark.nightly)
    for name in ("alex", "googlenetbn", "nin", "resnet50", "vgg16")
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
        (["--model", "missing/best.npz"], "No such file or directory: 'missing/model.json'"),
        (["--out", "missing/model.onnx"], "No such file or directory: 'missing/model.onnx'"),
    ],
)
def test_wrong_input_gives_one_line(export, arguments, message):
    with pytest.raises(SystemExit, match=rf"\Aerror: .*{message}\Z"):
        export(*arguments)


def test_error_without_onnx(export, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit, match=r"error: .*onnxruntime.*: pip install onnx onnxruntime"):
        export()
