"""Weights are loaded completely, without the head, or not at all."""

from pathlib import Path

import chainer
import numpy as np
import pytest

Arrays = dict[str, np.ndarray]


@pytest.fixture
def saved(app, tmp_path) -> tuple[chainer.Link, Path, Arrays]:
    model, path = app.models.ARCHITECTURES["small"](n_out=7), tmp_path / "weights.npz"
    chainer.serializers.save_npz(path, model)
    with np.load(path) as arrays:
        return model, path, dict(arrays)


def test_weights_of_another_network_are_named(app, saved):
    model, path, arrays = saved
    del arrays["bn3/beta"], arrays["bn2/N"]
    arrays["fc/W"] = np.zeros((10, 128), np.float32)
    arrays |= {f"other{i}/W": np.zeros(1) for i in range(7)}
    np.savez(path, **arrays)
    before = {name: p.array.copy() for name, p in model.namedparams()}
    with pytest.raises(ValueError, match="does not have the weights of this network") as caught:
        app.weights.load_weights(path, model)
    assert str(caught.value).partition("network: ")[2] == (
        "it lacks bn2/N, bn3/beta; it also has other0/W, other1/W, other2/W, other3/W, other4/W "
        "and 2 more; of other shapes are fc/W (10, 128), not (7, 128)"
    )
    for name, parameter in model.namedparams():
        np.testing.assert_array_equal(parameter.array, before[name])


def test_error_for_a_file_that_is_damaged_or_absent(app, saved):
    model, path, _ = saved
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    for damaged in (b"", b"weights", content[:middle], flipped):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=r"weights\.npz is (damaged|not an NPZ file)"):
            app.weights.load_weights(path, model)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(OSError, match=r"weights\.npz is not an NPZ file"):
        app.weights.load_weights(path, model)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.npz"):
        app.weights.load_weights(path, model)


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


def test_all_but_the_head(app, saved):
    _, path, arrays = saved
    fine_tuned = app.models.ARCHITECTURES["small"](n_out=3)
    head = fine_tuned.fc.W.array.copy()
    loaded = app.weights.load_weights(path, fine_tuned, but=["fc/W", "fc/b"])
    assert loaded == sorted(arrays.keys() - {"fc/W", "fc/b"})
    for name, array in chainer.serializers.npz.serialize(fine_tuned).items():
        expected = {"fc/W": head, "fc/b": np.zeros(3)}.get(name, arrays.get(name))
        np.testing.assert_array_equal(array, expected, err_msg=name)
    with pytest.raises(ValueError, match=r"of other shapes are fc/W \(7, 128\), not \(3, 128\)"):
        app.weights.load_weights(path, fine_tuned, but=["fc/b"])
