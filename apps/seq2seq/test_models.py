"""The networks, compared with other ways to compute them."""

from collections.abc import Callable

import chainer
import numpy as np
import pytest

KINDS = ["lstm", "transformer"]


@pytest.fixture
def make(app) -> Callable:
    """Return a function that makes a network."""

    def run(kind: str, *sizes: int):
        np.random.seed(1)
        with chainer.using_config("dtype", np.float64):
            return app.models.MODELS[kind](*sizes)

    return run


@pytest.fixture
def sentences(app) -> Callable[[int, int], np.ndarray]:
    """Return a function that makes a batch of ``n`` sentences of up to ``longest`` tokens."""

    def run(n: int, longest: int) -> np.ndarray:
        random = np.random.RandomState(3)
        rows = [random.randint(2, 9, size=1 + i % longest).astype("i") for i in range(n)]
        return app.batches.pad(rows)

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_one_step_after_another_scores_as_all_at_once(make, sentences, kind, layers):
    """Write two translations of each sentence, which trade places after every step."""
    network = make(kind, 9, 9, 8, layers)
    xs = sentences(5, 4)
    both = np.random.RandomState(0).randint(2, 9, size=(2, 5, 3)).astype("i")
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        whole = [network.decode(xs, ys)[0].array.reshape(5, 4, 9) for ys in both]
        decoding, last = network.begin(xs, beam=2), np.zeros(10, "i")
        for t in range(4):
            order = [t % 2, 1 - t % 2]
            scores = decoding.step(last).array.reshape(5, 2, 9)
            for j, which in enumerate(order):
                np.testing.assert_allclose(scores[:, j], whole[which][:, t], rtol=1e-9)
            if t < 3:
                decoding.select(np.arange(10) ^ 1)
                last = np.stack([both[which][:, t] for which in order[::-1]], axis=1).ravel()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(make, sentences, kind):
    network = make(kind, 9, 9, 8)
    xs, ys = sentences(5, 4), sentences(5, 3)
    wider = [np.pad(a, ((0, 0), (0, 2)), constant_values=-1) for a in (xs, ys)]
    losses = [float(network.loss(*batch).array) for batch in (wider, (xs, ys))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    weights = network.attend(xs, ys)
    np.testing.assert_allclose(weights.sum(axis=2), 1)
    assert (weights.transpose(0, 2, 1)[xs == -1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_later_changes_nothing(make, sentences, kind):
    network = make(kind, 9, 9, 8)
    xs, ys = sentences(5, 4), np.arange(15).reshape(5, 3).astype("i") % 7 + 2
    others = ys.copy()
    others[:, 1] = (ys[:, 1] - 1) % 7 + 2
    with chainer.no_backprop_mode():
        first, second = (network.decode(xs, y)[0].array.reshape(5, 4, 9) for y in (ys, others))
    np.testing.assert_allclose(first[:, :2], second[:, :2])
    assert (np.abs(first[:, 2:] - second[:, 2:]) > 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
def test_beam_of_one_takes_the_most_probable_token_each_time(make, sentences, kind):
    network = make(kind, 9, 9, 8)
    xs = sentences(5, 4)
    for x, found in zip(xs, network.translate(xs), strict=True):
        with chainer.no_backprop_mode():
            scores = network.decode(x[None], found[None])[0].array
        *written, end = scores.argmax(axis=1).tolist()
        assert found.tolist() == written
        assert end == 0 or len(written) == 2 * xs.shape[1] + 10


def test_attention_of_a_transformer_computed_by_hand(app):
    """Compare one head, one query and two keys with the formula of Vaswani et al."""
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        attention = app.models_transformer.Attention(2, 1)
    memory, queries = np.array([[[1.0, 2.0], [3.0, -1.0]]]), np.array([[[0.5, 1.5]]])
    found, weights = attention(
        chainer.Variable(queries), attention.project(chainer.Variable(memory)), None
    )

    def apply(link, x):
        return x @ link.W.array.T + link.b.array

    energies = apply(attention.key, memory[0]) @ apply(attention.query, queries[0, 0]) / 2**0.5
    wanted = np.exp(energies) / np.exp(energies).sum()
    np.testing.assert_allclose(weights.array[0, 0, 0], wanted)
    mean = wanted @ apply(attention.value, memory[0])
    np.testing.assert_allclose(found.array[0, 0], apply(attention.output, mean))


def test_units_that_heads_cannot_share_are_refused(make):
    with pytest.raises(ValueError, match="got 10 units and 4 heads"):
        make("transformer", 9, 9, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_wide_beam_finds_the_most_probable_translation(make, sentences, kind):
    network = make(kind, 9, 3, 8)
    (bias,) = (p for name, p in network.namedparams() if name.endswith("words/bias"))
    bias.array[:] = [3, 0, 1]  # favors short ones
    xs = sentences(2, 3)
    greedy, found = network.translate(xs), network.translate(xs, beam=40)

    def mean_log_p(i: int, translation: np.ndarray) -> float:
        with chainer.no_backprop_mode():
            return -float(network.loss(xs[i : i + 1], translation[None].astype("i")).array)

    every = [np.array(t, "i") for n in range(4) for t in np.ndindex(*[3] * n) if 0 not in t]
    for i in range(2):
        best = max(mean_log_p(i, t) for t in every)
        assert mean_log_p(i, found[i]) >= best - 1e-5
        assert mean_log_p(i, found[i]) >= mean_log_p(i, greedy[i]) - 1e-6
