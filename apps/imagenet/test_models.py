"""The networks are those of the papers."""

import chainer
import numpy as np
import pytest

# The papers give them rounded: 60 million, 138 million, or a table of layers to add up.
PARAMETERS = {
    "alex": 60_965_224,
    "nin": 7_595_176,
    "vgg16": 138_357_544,
    "googlenet": 13_378_280,
    "googlenetbn": 11_285_224,
    "resnet50": 25_557_032,
}
REDUCED = {
    "alex": 67,
    "nin": 67,
    "vgg16": 32,
    "googlenet": 64,
    "googlenetbn": 64,
    "resnet50": 64,
    "small": 24,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(app, name, monkeypatch):
    # To draw them takes longer than all the rest.
    monkeypatch.setattr(chainer.initializers.Normal, "__call__", lambda self, array: array.fill(0))
    model = app.models.ARCHITECTURES[name](n_out=1000)
    images = np.zeros((1, 3, model.insize, model.insize), np.float32)
    with chainer.using_config("train", name == "googlenet"), chainer.no_backprop_mode():
        model(images)
    assert model.count_params() == PARAMETERS[name]


def test_googlenet_without_its_auxiliary_classifiers(app):
    model = app.models.ARCHITECTURES["googlenet"](n_out=1000)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        model(np.zeros((1, 3, 224, 224), np.float32))
    names = [name for name, p in model.namedparams() if "auxiliary" not in name]
    assert sum(dict(model.namedparams())[name].size for name in names) == 6_998_552


def test_every_network_is_tested(app):
    assert set(app.models.ARCHITECTURES) == set(REDUCED)


@pytest.mark.parametrize("name", REDUCED)
def test_scores_and_gradients(app, name):
    np.random.seed(0)
    model = app.models.ARCHITECTURES[name](n_out=7)
    classifier = app.training.Classifier(model, smoothing=0.1)
    x = np.random.rand(2, 3, REDUCED[name], REDUCED[name]).astype(np.float32)
    loss = classifier(x, np.array([3, 6], np.int32))
    classifier.cleargrads()
    loss.backward()
    assert loss.dtype == np.float32
    assert all(p.grad is not None and np.isfinite(p.grad).all() for p in model.params())
    with chainer.using_config("train", False):
        assert model(x).shape == (2, 7)


def test_loss_with_and_without_smoothing(app):
    scores = chainer.Variable(np.random.RandomState(0).randn(5, 4).astype(np.float32))
    t = np.arange(5, dtype=np.int32) % 4
    plain = app.training.Classifier(chainer.Link()).loss(scores, t)
    expected = chainer.functions.softmax_cross_entropy(scores, t)
    np.testing.assert_allclose(plain.array, expected.array, rtol=1e-6)

    smooth = app.training.Classifier(chainer.Link(), 0.1).loss(scores, t)
    target = np.full((5, 4), 0.1 / 4)
    target[np.arange(5), t] += 0.9
    log_p = chainer.functions.log_softmax(scores).array
    np.testing.assert_allclose(smooth.array, -(target * log_p).sum(axis=1).mean(), rtol=1e-6)


def test_learning_rate_rises_and_falls(app):
    cosine = app.training.LearningRate(0.4, 20, 2, "cosine")
    assert [cosine.at(epoch) for epoch in (0, 1, 2, 11, 20)] == pytest.approx(
        [0.04, 0.22, 0.4, 0.2, 0]
    )
    step = app.training.LearningRate(0.4, 90, 5, "step")
    assert [step.at(epoch) for epoch in (5, 29, 30, 59, 60, 79, 80)] == pytest.approx(
        [0.4, 0.4, 0.04, 0.04, 0.004, 0.004, 0.0004]
    )
