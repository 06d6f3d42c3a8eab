"""Which weights a step changes, and the moving average of weights."""

from types import SimpleNamespace

import chainer
import numpy as np
import pytest


def step(training, network, average, ema, iteration):
    """Change the network as a step does, and update its moving average."""
    network.W.array += np.float32(iteration**2)
    ema(SimpleNamespace(updater=SimpleNamespace(iteration=iteration)))


def test_average_of_the_weights_of_all_steps(app):
    network, average = (chainer.links.Linear(None, 2) for _ in range(2))
    ema = app.training.MovingAverage(average, network, decay=0.5)
    network.W.initialize((2, 3))
    weights, expected = network.W.array.astype(np.float64), None
    for iteration in range(1, 30):
        step(app.training, network, average, ema, iteration)
        weights = weights + iteration**2
        decay = min(0.5, (iteration - 1) / (iteration + 8))
        expected = weights if decay == 0 else decay * expected + (1 - decay) * weights
    np.testing.assert_allclose(average.W.array, expected, rtol=1e-5)

    saved = chainer.serializers.DictionarySerializer()
    ema.serialize(saved)
    again = app.training.MovingAverage(chainer.links.Linear(None, 2), network, decay=0.5)
    again.serialize(chainer.serializers.NpzDeserializer(saved.target))
    np.testing.assert_array_equal(again.average.W.array, average.W.array)


def test_average_takes_over_what_batch_normalization_has_counted(app):
    network, average = (app.models.ARCHITECTURES["small"](3) for _ in range(2))
    network.bn1.avg_mean += 5
    ema = app.training.MovingAverage(average, network, decay=0.5)
    ema(SimpleNamespace(updater=SimpleNamespace(iteration=7)))
    np.testing.assert_array_equal(average.bn1.avg_mean, network.bn1.avg_mean)
    assert average.bn1.avg_mean is not network.bn1.avg_mean


def test_frozen_layers_compute_as_in_evaluation_and_stay_as_they_are(app):
    network = app.models.ARCHITECTURES["small"](3)
    model = app.training.Classifier(network)
    optimizer = chainer.optimizers.SGD(0.5).setup(model)
    app.training.freeze(network, ["conv1", "bn1"])
    before = {k: np.copy(v) for k, v in chainer.serializers.npz.serialize(network).items()}
    x = np.random.RandomState(0).rand(4, 3, 48, 48).astype(np.float32)
    optimizer.update(model, x, np.array([0, 1, 2, 0], np.int32))
    after = chainer.serializers.npz.serialize(network)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert {name for name in same if not name.endswith("/N")} == {
        f"{layer}/{name}"
        for layer, names in (("conv1", ["W"]), ("bn1", ["gamma", "beta", "avg_mean", "avg_var"]))
        for name in names
    }
    assert chainer.config.train
    with chainer.using_config("train", False):
        expected = network.bn1(network.conv1(x)).array
    np.testing.assert_array_equal(network.bn1(network.conv1(x)).array, expected)


def test_weights_decay_but_neither_biases_nor_scales(app):
    network = app.models.ARCHITECTURES["small"](3)
    optimizer = chainer.optimizers.SGD(0.5).setup(network)
    app.training.add_weight_decay(network, 0.1)
    network(np.zeros((2, 3, 48, 48), np.float32))  # so that all weights exist
    before = {name: np.copy(p.array) for name, p in network.namedparams()}
    for parameter in network.params():
        parameter.grad = np.zeros_like(parameter.array)
    optimizer.update()
    for name, parameter in network.namedparams():
        rate = 1 - 0.5 * 0.1 if name.endswith("/W") else 1
        np.testing.assert_allclose(parameter.array, rate * before[name], rtol=1e-6, err_msg=name)


def test_layer_that_is_not_there(app, not_drawn):
    with pytest.raises(ValueError, match="no layer 'res9', but bn1, conv1, fc, res2"):
        app.training.freeze(app.models.ARCHITECTURES["resnet50"](3), ["res9"])


def test_trigger_of_epochs_and_intervals(app):
    trigger = app.training.EpochOrInterval(4)

    def is_due(iteration, is_new_epoch=False):
        updater = SimpleNamespace(iteration=iteration, is_new_epoch=is_new_epoch)
        return trigger(SimpleNamespace(updater=updater))

    assert [i for i in range(1, 10) if is_due(i)] == [4, 8]
    assert is_due(5, is_new_epoch=True)
