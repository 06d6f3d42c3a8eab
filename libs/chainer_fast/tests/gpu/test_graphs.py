"""Training with CUDA graphs gives the numbers of training without, on a GPU.

On the null GPU, where all numbers are zero, these tests show that steps are recorded.
"""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda

from libs.chainer_fast.tests import models_for_graphs as models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Non finite number found"),
    pytest.mark.filterwarnings("ignore:.* skipped, because a gradient was not finite"),
]

N_STEPS = 16
#: Most steps that are not launched: without states or kernels, while recording, and compared.
N_FIRST = 7


@pytest.fixture(autouse=True)
def on_gpu(device):
    device.use()
    with chainer.using_config("cudnn_deterministic", True):
        yield


def computes():
    """Return whether kernels compute; those of the null GPU do not."""
    return float(cuda.cupy.ones(3).sum()) == 3


class Unrecorded(chainer.FunctionHook):
    """While there is a hook of functions, steps are those of graphs, but are not recorded."""

    name = "not recorded"


PLAIN, UNRECORDED, RECORDED = "plain", "not recorded", "recorded"


def train(device, make, optimizer, data, how, *, prepare=None, between=None, lossfun=None):
    """Take a step with each batch; return parameters, states, losses and the optimizer."""
    np.random.seed(0)
    device.xp.random.seed(0)
    model = chainer.links.Classifier(make())
    model.compute_accuracy = False
    model.to_device(device)
    optimizer = optimizer().setup(model)
    if prepare is not None:
        prepare(optimizer)
    if how is not PLAIN:
        optimizer.use_cuda_graphs()
    losses = []
    reporter = chainer.Reporter()
    reporter.add_observer("main", model)
    for k, batch in enumerate(data):
        if between is not None:
            between(k, optimizer)
        args = device.send(batch)
        with reporter.scope({}):
            if how is UNRECORDED:
                with Unrecorded():
                    optimizer.update(lossfun or model, *args)
            else:
                optimizer.update(lossfun or model, *args)
            losses.append(reporter.observation.get("main/loss"))
    found = {name: parameter.array for name, parameter in model.namedparams()}
    for path, link in model.namedlinks():
        found |= {f"{path}/{name}": getattr(link, name) for name in link._persistent}
    for name, parameter in model.namedparams():
        states = parameter.update_rule.state or {}
        found |= {f"{key} of {name}": value for key, value in states.items()}
    found |= {f"loss {k}": loss.array for k, loss in enumerate(losses) if loss is not None}
    return {name: cuda.to_cpu(array) for name, array in found.items()}, optimizer


def compare(
    device, make, optimizer, *, exact=True, data=None, plain=1e-3, n_first=N_FIRST, **more
):
    """Compare steps by graphs with the same ones unrecorded, and perhaps with plain ones.

    ``plain`` is a tolerance for the latter, whose products and draws are others.
    """
    data = data or models.batches(make(), N_STEPS)
    found, recorded = train(device, make, optimizer, data, RECORDED, **more)
    expected, unrecorded = train(device, make, optimizer, data, UNRECORDED, **more)
    assert_close(found, expected, 0 if exact else 1e-3)
    others = [unrecorded]
    if plain is not None:
        expected, eager = train(device, make, optimizer, data, PLAIN, **more)
        assert_close(found, expected, plain)
        others.append(eager)
    for other in others:
        assert numbers_of(recorded) == numbers_of(other)
    assert unrecorded.cuda_graphs.n_launched == 0
    graphs = recorded.cuda_graphs
    assert graphs.are_on
    assert graphs.n_launched >= len(data) - n_first
    return graphs


def numbers_of(optimizer):
    counts = [parameter.update_rule.t for parameter in optimizer.target.params()]
    return optimizer.t, counts, optimizer._loss_scale if computes() else None


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype), name
        if not computes():
            continue
        wanted = np.asarray(expected[name], "d")
        scale = max(1e-3, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(
            np.asarray(array, "d") / scale, wanted / scale, rtol=0, atol=tolerance, err_msg=name
        )


def momentum():
    return chainer.optimizers.MomentumSGD(0.01)


# Models


def test_dropout_and_batch_normalization(device):
    compare(device, models.Perceptron, momentum, plain=None)


def test_batch_normalization(device):
    compare(device, lambda: models.Perceptron(0), momentum)


@pytest.mark.parametrize("make", [models.Images, models.Inception])
def test_images(make, device):
    compare(device, make, momentum, plain=1e-2)


@pytest.mark.parametrize("make", [models.Images, models.Inception])
def test_images_by_cudnn(make, device, by_cudnn):
    compare(device, make, momentum, plain=1e-2)


def test_words(device):
    # Rows of an embedding are added up in any order.
    compare(device, models.Words, momentum, exact=False, plain=None)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_cross_entropy(normalize, device):
    def prepare(optimizer):
        optimizer.target.lossfun = cross_entropy

    def cross_entropy(y, t):
        return F.softmax_cross_entropy(y, t, normalize=normalize)

    data = models.batches(models.Plain(), N_STEPS)
    for _, labels in data:
        labels[::3] = -1
    compare(device, models.Plain, momentum, data=data, prepare=prepare)


# Optimizers


@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_optimizers(name, device):
    compare(device, models.Plain, models.OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["MomentumSGD", "Adam"])
def test_weight_decay_and_schedules(name, device):
    def prepare(optimizer):
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-2))

    def between(k, optimizer):
        rate = "alpha" if name == "Adam" else "lr"
        setattr(optimizer, rate, 0.01 / (1 + k))
        optimizer.target.predictor.last.b.update_rule.hyperparam.eps = 1e-7

    compare(device, models.Plain, models.OPTIMIZERS[name], prepare=prepare, between=between)


@pytest.mark.parametrize("name", ["SGD", "MomentumSGD", "Adam"])
@pytest.mark.parametrize("clips", [False, True])
def test_mixed_precision_with_overflows(name, clips, device):
    def prepare(optimizer):
        optimizer.use_fp32_update()
        optimizer.loss_scaling(interval=3)
        if clips:
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))

    data = models.batches(models.Half(), 24)
    for k in (1, 12, 13, 20):
        data[k][0][2, 3] = np.inf
    make = models.OPTIMIZERS[name]
    # Steps that overflow do not initialize states.
    compare(device, models.Half, make, data=data, prepare=prepare, plain=1e-2, n_first=10)


# What a script does


def test_a_hundred_losses(device):
    data = models.batches(models.Plain(), 100)
    graphs = compare(device, models.Plain, momentum, data=data)
    assert graphs.n_recorded == 1
    found, _ = train(device, models.Plain, momentum, data, RECORDED)
    losses = {float(array) for name, array in found.items() if name.startswith("loss ")}
    assert len(losses) == (100 if computes() else 1)


def test_batches_of_two_sizes(device):
    small = models.batches(models.Plain(), 30, size=3)
    large = models.batches(models.Plain(), 30)
    data = [small[k] if k % 5 == 4 else large[k] for k in range(30)]
    graphs = compare(device, models.Plain, momentum, data=data, n_first=12)
    assert graphs.n_recorded == 2


def reads_the_loss(optimizer):
    model = optimizer.target

    def lossfun(x, t):
        loss = model(x, t)
        return loss if float(loss.array) >= 0 else 2 * loss

    return lossfun


def draws_by_cupy(optimizer):
    model = optimizer.target
    return lambda x, t: model(x + cuda.cupy.random.rand(*x.shape, dtype="f"), t)


def drops_states(optimizer):
    model = optimizer.target
    return lambda x, t: model(F.zoneout(x, x, 0.5), t)


def pads_sequences(optimizer):
    model = optimizer.target
    return lambda x, t: model(F.pad_sequence(F.separate(x)), t)


def has_sequences(optimizer):
    lstm, model = chainer.links.NStepLSTM(1, 12, 12, 0), optimizer.target
    lstm.to_device(model.device)
    return lambda x, t: model(F.concat(lstm(None, None, F.split_axis(x, 3, 0))[2], 0), t)


def has_its_own_hook(optimizer):
    optimizer.add_hook(lambda optimizer: None, "mine")
    return optimizer.target


CANNOT = [
    (reads_the_loss, momentum, "operation not permitted|captur"),
    (draws_by_cupy, momentum, "cuRAND"),
    (drops_states, momentum, "cuRAND"),
    (pads_sequences, momentum, "H2D transfers are disallowed"),
    (has_sequences, momentum, "H2D transfers are disallowed"),
    (has_its_own_hook, momentum, "the hook 'mine' is the script's own code"),
    (None, chainer.optimizers.MSVAG, "update rules change numbers on the host in each step"),
]


@pytest.mark.parametrize(("change", "optimizer", "reason"), CANNOT)
def test_steps_that_cannot_be_recorded_go_on_without_graphs(change, optimizer, reason, device):
    data = models.batches(models.Plain(), N_STEPS)

    def run(how):
        functions = []

        def prepare(optimizer):
            functions.append(change(optimizer) if change else optimizer.target)

        def lossfun(x, t):
            return functions[0](x, t)

        more = {"prepare": prepare, "lossfun": lossfun}
        return train(device, models.Plain, optimizer, data, how, **more)

    with pytest.warns(UserWarning, match=f"no CUDA graphs: .*({reason})") as said:
        found, recorded = run(RECORDED)
    assert [each.category for each in said].count(UserWarning) == 1
    assert (recorded.cuda_graphs.are_on, recorded.cuda_graphs.n_launched) == (False, 0)
    assert all(f"loss {k}" in found for k in range(N_STEPS))
    expected, _ = run(PLAIN)
    draws = change in (draws_by_cupy, drops_states)
    if not draws:  # a recording that failed has drawn, too
        assert_close(found, expected, 1e-3)
