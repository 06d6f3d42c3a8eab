"""The networks match the papers, and the names and results of Chainer's example."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.links.model.vision import googlenet as chainers_googlenet
from chainer.links.model.vision import resnet as chainers_resnet
from safetensors.numpy import save_file

import chainermn

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]

# Batches on which networks train fast: number of pictures and their side. Some networks need
# more than one picture, or pictures as large as they were designed for.
BATCHES = {
    "alex": (1, 227),
    "googlenet": (1, 224),
    "googlenetbn": (2, 224),
    "nin": (2, 67),
    "resnet50": (2, 64),
    "resnet101": (2, 64),
    "resnet152": (2, 64),
    "small": (2, 24),
    "vgg16": (2, 32),
}
# Numbers of arrays and of parameters. The papers round the latter (60 million, 138 million), or
# give a table of layers to add up.
PARAMETERS = {
    "alex": (16, 62_378_344),
    "googlenet": (128, 13_378_280),
    "googlenetbn": (222, 17_587_128),
    "nin": (24, 7_595_176),
    "resnet50": (162, 25_557_096),
}


# Contents of the files of Chainer's example: its names, with shapes that follow from the papers.


def layer(name: str, *shape: int, bias: bool = True) -> Shapes:
    return {f"{name}/W": shape} | ({f"{name}/b": shape[:1]} if bias else {})


def convolution(name: str, n_in: int, n_out: int, ksize: int, bias: bool = True) -> Shapes:
    return layer(name, n_out, n_in, ksize, ksize, bias=bias)


def normalization(name: str, n: int) -> Shapes:
    arrays = ("gamma", "beta", "avg_mean", "avg_var")
    return {f"{name}/{array}": (n,) for array in arrays} | {f"{name}/N": ()}


def alex() -> Shapes:
    return (
        convolution("conv1", 3, 96, 11)
        | convolution("conv2", 96, 256, 5)
        | convolution("conv3", 256, 384, 3)
        | convolution("conv4", 384, 384, 3)
        | convolution("conv5", 384, 256, 3)
        | layer("fc6", 4096, 9216)
        | layer("fc7", 4096, 4096)
        | layer("fc8", 1000, 4096)
    )


def nin() -> Shapes:
    shapes: Shapes = {}
    n_in = 3
    for number, (ksize, *widths) in enumerate(
        [(11, 96, 96, 96), (5, 256, 256, 256), (3, 384, 384, 384), (3, 1024, 1024, 1000)], 1
    ):
        for place, width in enumerate(widths):
            shapes |= convolution(f"mlpconv{number}/{place}", n_in, width, 1 if place else ksize)
            n_in = width
    return shapes


def googlenet() -> Shapes:
    shapes = (
        convolution("conv1", 3, 64, 7)
        | convolution("conv2_reduce", 64, 64, 1)
        | convolution("conv2", 64, 192, 3)
    )
    n_in = 192
    for name, one, proj3, three, proj5, five, pooled in [
        ("inc3a", 64, 96, 128, 16, 32, 32),
        ("inc3b", 128, 128, 192, 32, 96, 64),
        ("inc4a", 192, 96, 208, 16, 48, 64),
        ("inc4b", 160, 112, 224, 24, 64, 64),
        ("inc4c", 128, 128, 256, 24, 64, 64),
        ("inc4d", 112, 144, 288, 32, 64, 64),
        ("inc4e", 256, 160, 320, 32, 128, 128),
        ("inc5a", 256, 160, 320, 32, 128, 128),
        ("inc5b", 384, 192, 384, 48, 128, 128),
    ]:
        shapes |= (
            convolution(f"{name}/conv1", n_in, one, 1)
            | convolution(f"{name}/proj3", n_in, proj3, 1)
            | convolution(f"{name}/conv3", proj3, three, 3)
            | convolution(f"{name}/proj5", n_in, proj5, 1)
            | convolution(f"{name}/conv5", proj5, five, 5)
            | convolution(f"{name}/projp", n_in, pooled, 1)
        )
        n_in = one + three + five + pooled
    for name, n_in in (("loss1", 512), ("loss2", 528)):
        shapes |= (
            convolution(f"{name}_conv", n_in, 128, 1)
            | layer(f"{name}_fc1", 1024, 2048)
            | layer(f"{name}_fc2", 1000, 1024)
        )
    return shapes | layer("loss3_fc", 1000, 1024)


def googlenetbn() -> Shapes:
    shapes = (
        convolution("conv1", 3, 64, 7, bias=False)
        | normalization("norm1", 64)
        | convolution("conv2", 64, 192, 3, bias=False)
        | normalization("norm2", 192)
    )
    n_in = 192
    for name, one, proj3, three, proj33, double, pooled in [
        ("inc3a", 64, 64, 64, 64, 96, 32),
        ("inc3b", 64, 64, 96, 64, 96, 64),
        ("inc3c", 0, 128, 160, 64, 96, 0),
        ("inc4a", 224, 64, 96, 96, 128, 128),
        ("inc4b", 192, 96, 128, 96, 128, 128),
        ("inc4c", 128, 128, 160, 128, 160, 128),
        ("inc4d", 64, 128, 192, 160, 192, 128),
        ("inc4e", 0, 128, 192, 192, 256, 0),
        ("inc5a", 352, 192, 320, 160, 224, 128),
        ("inc5b", 352, 192, 320, 192, 224, 128),
    ]:
        convolutions = [
            ("proj3", n_in, proj3, 1),
            ("conv3", proj3, three, 3),
            ("proj33", n_in, proj33, 1),
            ("conv33a", proj33, double, 3),
            ("conv33b", double, double, 3),
        ]
        if one:
            convolutions += [("conv1", n_in, one, 1), ("poolp", n_in, pooled, 1)]
        for part, *channels, ksize in convolutions:
            shapes |= convolution(f"{name}/{part}", *channels, ksize, bias=False)
            shapes |= normalization(f"{name}/{part}n", channels[1])
        n_in = one + three + double + (pooled or n_in)
    for name in "ab":
        shapes |= (
            convolution(f"conv{name}", 576, 128, 1, bias=False)
            | normalization(f"norm{name}", 128)
            | layer(f"lin{name}", 1024, 2048, bias=False)
            | normalization(f"norm{name}2", 1024)
            | layer(f"out{name}", 1000, 1024)
        )
    return shapes | layer("out", 1000, 1024)


def resnet50() -> Shapes:
    shapes = convolution("conv1", 3, 64, 7) | normalization("bn1", 64)
    n_in = 64
    for stage, blocks, inner in ((2, 3, 64), (3, 4, 128), (4, 6, 256), (5, 3, 512)):
        for block in range(blocks):
            convolutions = [(n_in, inner, 1), (inner, inner, 3), (inner, 4 * inner, 1)]
            if block == 0:
                convolutions.append((n_in, 4 * inner, 1))
            for number, (channels, width, ksize) in enumerate(convolutions, 1):
                prefix = f"res{stage}/{block}"
                shapes |= convolution(f"{prefix}/conv{number}", channels, width, ksize, bias=False)
                shapes |= normalization(f"{prefix}/bn{number}", width)
            n_in = 4 * inner
    return shapes | layer("fc", 1000, 2048)


SHAPES = {make.__name__: make for make in (alex, googlenet, googlenetbn, nin, resnet50)}


def draw(shapes: Shapes) -> Arrays:
    """Return weights that keep every layer's output from vanishing or exploding."""
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for name, shape in shapes.items():
        kind = name.rpartition("/")[2]
        if kind == "N":
            arrays[name] = np.array(0)
            continue
        array = random.standard_normal(shape, dtype=np.float32)
        if kind == "W":
            array *= (2 / array[0].size) ** 0.5
        elif kind in ("gamma", "avg_var"):
            array = 1 + 0.2 * np.tanh(array)
        else:
            array *= 0.1
        arrays[name] = array
    return arrays


# The same computations, by Chainer's own links for a network if it has them, otherwise by
# functions. All return the scores and, in training, those of the auxiliary classifiers.


def convolve(w: Arrays, name: str, x: chainer.Variable, **options: int) -> chainer.Variable:
    return F.convolution_2d(x, w[f"{name}/W"], w.get(f"{name}/b"), **options)


def normalize(w: Arrays, name: str, x: chainer.Variable) -> chainer.Variable:
    gamma, beta = w[f"{name}/gamma"], w[f"{name}/beta"]
    if chainer.config.train:
        return F.relu(F.batch_normalization(x, gamma, beta))
    mean, variance = w[f"{name}/avg_mean"], w[f"{name}/avg_var"]
    return F.relu(F.fixed_batch_normalization(x, gamma, beta, mean, variance))


def by_alex(w: Arrays, x: np.ndarray) -> list[chainer.Variable]:
    h = F.relu(convolve(w, "conv1", x, stride=4))
    h = F.max_pooling_2d(F.local_response_normalization(h), 3, 2)
    h = F.relu(convolve(w, "conv2", h, pad=2))
    h = F.max_pooling_2d(F.local_response_normalization(h), 3, 2)
    for name in ("conv3", "conv4", "conv5"):
        h = F.relu(convolve(w, name, h, pad=1))
    h = F.max_pooling_2d(h, 3, 2)
    for name in ("fc6", "fc7"):
        h = F.relu(F.linear(h, w[f"{name}/W"], w[f"{name}/b"]))
    return [F.linear(h, w["fc8/W"], w["fc8/b"])]


def by_nin(w: Arrays, x: np.ndarray) -> list[chainer.Variable]:
    h = x
    for number, options in enumerate([{"stride": 4}, {"pad": 2}, {"pad": 1}, {"pad": 1}], 1):
        h = F.relu(convolve(w, f"mlpconv{number}/0", h, **options))
        h = F.relu(convolve(w, f"mlpconv{number}/1", h))
        h = convolve(w, f"mlpconv{number}/2", h)
        if number < 4:
            h = F.max_pooling_2d(F.relu(h), 3, 2)
    return [F.average_pooling_2d(h, 6).reshape(len(x), 1000)]


def by_googlenet(w: Arrays, x: np.ndarray) -> list[chainer.Variable]:
    link = L.GoogLeNet(pretrained_model=None)
    chainer.serializers.NpzDeserializer(w).load(link)
    layers = ["loss3_fc"]
    if chainer.config.train:
        layers += ["loss1_fc2", "loss2_fc2"]
    found = link(x, layers)
    return [found[name] for name in layers]


def by_googlenetbn(w: Arrays, x: np.ndarray) -> list[chainer.Variable]:
    def block(name: str, h: chainer.Variable, **options: int) -> chainer.Variable:
        return normalize(w, f"{name}n", convolve(w, name, h, **options))

    def inception(name: str, h: chainer.Variable) -> chainer.Variable:
        stride = 2 if name in ("inc3c", "inc4e") else 1
        three = block(f"{name}/conv3", block(f"{name}/proj3", h), pad=1, stride=stride)
        double = block(f"{name}/conv33a", block(f"{name}/proj33", h), pad=1)
        double = block(f"{name}/conv33b", double, pad=1, stride=stride)
        if stride == 2:
            return F.concat([three, double, F.max_pooling_2d(h, 3, 2, 1, cover_all=False)])
        pool = F.max_pooling_2d if name == "inc5b" else F.average_pooling_2d
        pooled = block(f"{name}/poolp", pool(h, 3, 1, 1))
        return F.concat([block(f"{name}/conv1", h), three, double, pooled])

    def auxiliary(name: str, h: chainer.Variable) -> chainer.Variable:
        h = normalize(w, f"norm{name}", convolve(w, f"conv{name}", F.average_pooling_2d(h, 5, 3)))
        h = normalize(w, f"norm{name}2", F.linear(h, w[f"lin{name}/W"]))
        return F.linear(h, w[f"out{name}/W"], w[f"out{name}/b"])

    h = normalize(w, "norm1", convolve(w, "conv1", x, stride=2, pad=3))
    h = F.max_pooling_2d(h, 3, 2, 1)
    h = F.max_pooling_2d(normalize(w, "norm2", convolve(w, "conv2", h, pad=1)), 3, 2, 1)
    scores = []
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        h = inception(f"inc{name}", h)
        if chainer.config.train and name in ("4a", "4d"):
            scores.append(auxiliary("a" if name == "4a" else "b", h))
    assert h.shape[2:] == (8, 8)
    return [F.linear(F.mean(h[:, :, :7, :7], axis=(2, 3)), w["out/W"], w["out/b"]), *scores]


def by_resnet50(w: Arrays, x: np.ndarray) -> list[chainer.Variable]:
    def name_of_link(name: str) -> str:
        stage, _, rest = name.partition("/")
        block, _, array = rest.partition("/")
        if stage == "fc":
            return f"fc6/{rest}"
        return f"{stage}/{f'b{block}' if int(block) else 'a'}/{array}" if array else name

    link = L.ResNet50Layers(pretrained_model=None)
    named = {name_of_link(name): array for name, array in w.items() if "res" in name}
    named |= {name_of_link(name): array for name, array in w.items() if "res" not in name}
    chainer.serializers.NpzDeserializer(named).load(link)
    return [link(x, ["fc6"])["fc6"]]


COMPUTE: dict[str, Callable] = {
    "alex": by_alex,
    "googlenet": by_googlenet,
    "googlenetbn": by_googlenetbn,
    "nin": by_nin,
    "resnet50": by_resnet50,
}


def sample(names: Iterable[str], *nightly: str) -> list[object]:
    """Return networks as parameters of a test; the slow ones are tested nightly."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in nightly)) for name in names]


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_those_of_chainers_example(app, name, not_drawn):
    model = app.models.create(name, 1000, SHAPES[name]())
    saved = chainer.serializers.npz.serialize(model)
    assert {key: np.shape(array) for key, array in saved.items()} == SHAPES[name]()
    assert (len(list(model.params())), model.count_params()) == PARAMETERS[name]


@pytest.mark.nightly
def test_vgg16_has_as_many_parameters_as_in_the_paper(app, not_drawn):
    model = app.models.ARCHITECTURES["vgg16"](n_out=1000)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        model(np.zeros((1, 3, model.insize, model.insize), np.float32))
    assert model.count_params() == 138_357_544


@pytest.mark.parametrize("name", sample(SHAPES, "alex"))
def test_weights_of_chainers_example_load_and_compute_what_they_do_there(
    app, name, not_drawn, monkeypatch, tmp_path
):
    # Otherwise each would drop out other units. Chainer's link normalizes as Caffe does.
    monkeypatch.setattr(F, "dropout", lambda h, ratio=0.5: h)
    monkeypatch.setattr(chainers_googlenet, "_dropout", lambda h: h)
    normalize_as_example = functools.partial(F.local_response_normalization, n=5)
    monkeypatch.setattr(chainers_googlenet, "_local_response_normalization", normalize_as_example)
    arrays = draw(SHAPES[name]())
    path: Path = tmp_path / "weights.npz"
    np.savez(path, **arrays)
    model, _ = app.weights.load_network(path, name, 1000)
    path.unlink()  # alex has 250 MB
    for key, parameter in model.namedparams():
        np.testing.assert_array_equal(parameter.array, arrays[key[1:]], err_msg=key)

    side = {"alex": 227, "nin": 227}.get(name, 224)
    modes = [False, True] if "googlenet" in name else [False]
    n = len(modes)  # to normalize the batch of an auxiliary classifier takes two pictures
    x = np.random.default_rng(1).standard_normal((n, 3, side, side), dtype=np.float32)
    for train in modes:
        with chainer.using_config("train", train), chainer.no_backprop_mode():
            scores = model(x)
            expected = COMPUTE[name](arrays, x)
        scores = scores if train else (scores,)
        assert len(scores) == len(expected)
        for ours, theirs in zip(scores, expected, strict=True):
            assert theirs.shape == (n, 1000)
            spread = theirs.array.std()
            assert spread > 0.01
            np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=1e-3 * spread)


# torchvision's ResNets: numbers of blocks, and of parameters in its documentation.
RESNETS = {
    "resnet50": ((3, 4, 6, 3), 25_557_032),
    "resnet101": ((3, 4, 23, 3), 44_549_160),
    "resnet152": ((3, 8, 36, 3), 60_192_808),
}


def torchvision_resnet(blocks: Iterable[int], n_out: int) -> Shapes:
    """Return torchvision's names and shapes."""
    shapes: Shapes = {}

    def add(conv: str, norm: str, *shape: int) -> None:
        shapes[f"{conv}.weight"] = shape
        for array in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{array}"] = shape[:1]
        shapes[f"{norm}.num_batches_tracked"] = ()

    add("conv1", "bn1", 64, 3, 7, 7)
    n_in = 64
    for stage, n in enumerate(blocks, 1):
        inner = 32 * 2**stage
        for block in range(n):
            place = f"layer{stage}.{block}."
            add(f"{place}conv1", f"{place}bn1", inner, n_in, 1, 1)
            add(f"{place}conv2", f"{place}bn2", inner, inner, 3, 3)
            add(f"{place}conv3", f"{place}bn3", 4 * inner, inner, 1, 1)
            if block == 0:
                add(f"{place}downsample.0", f"{place}downsample.1", 4 * inner, n_in, 1, 1)
            n_in = 4 * inner
    return shapes | {"fc.weight": (n_out, 2048), "fc.bias": (n_out,)}


def draw_tensors(shapes: Shapes) -> Arrays:
    """Return what `draw` does, under PyTorch's names."""
    kinds = {"bias": "b", "running_mean": "b", "running_var": "avg_var", "weight": "W"}
    kinds |= {"num_batches_tracked": "N"}
    named = {
        name: "gamma"
        if name.endswith("weight") and len(shape) == 1
        else kinds[name.split(".")[-1]]
        for name, shape in shapes.items()
    }
    drawn = draw({f"{name}/{kind}": shapes[name] for name, kind in named.items()})
    return {name: drawn[f"{name}/{kind}"] for name, kind in named.items()}


def chainers_name(name: str) -> str:
    """Return the name in `L.ResNet50Layers` of one of torchvision's weights."""
    *place, layer, array = name.replace("downsample.", "downsample").split(".")
    layer = {"downsample0": "conv4", "downsample1": "bn4", "fc": "fc6"}.get(layer, layer)
    arrays = {"weight": "W", "bias": "b"}
    if layer.startswith("bn"):
        arrays = {"weight": "gamma", "bias": "beta", "num_batches_tracked": "N"}
        arrays |= {"running_mean": "avg_mean", "running_var": "avg_var"}
    if place:
        stage, block = place
        place = [f"res{int(stage[-1]) + 1}", f"b{block}" if int(block) else "a"]
    return "/".join([*place, layer, arrays[array]])


@pytest.mark.parametrize("name", sample(RESNETS, "resnet101", "resnet152"))
def test_weights_of_torchvision_load_and_compute_what_they_do_there(
    app, name, not_drawn, monkeypatch, tmp_path
):
    """Compare with Chainer's link, told to compute as Facebook's network does."""
    blocks, n_parameters = RESNETS[name]
    tensors = draw_tensors(torchvision_resnet(blocks, 1000))
    save_file(tensors, tmp_path / "weights.safetensors")
    model, loaded = app.weights.load_network(tmp_path / "weights.safetensors", name, 1000)
    assert (len(loaded), model.count_params()) == (len(tensors), n_parameters)
    (tmp_path / "weights.safetensors").unlink()

    pool = functools.partial(F.max_pooling_2d, pad=1, cover_all=False)
    monkeypatch.setattr(chainers_resnet, "max_pooling_2d", pool)
    link = getattr(L, f"ResNet{name[6:]}Layers")(pretrained_model=None, downsample_fb=True)
    named = {chainers_name(name): array for name, array in tensors.items()}
    named["conv1/b"] = np.zeros(64, np.float32)
    chainer.serializers.NpzDeserializer(named).load(link)
    for layer in link.links():
        if isinstance(layer, L.BatchNormalization):
            layer.eps = 1e-5
    x = np.random.default_rng(1).standard_normal((2, 3, 64, 64), dtype=np.float32)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores, expected = model(x).array, link(x, ["fc6"])["fc6"].array
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("name", ["resnet101", "resnet152", "vgg16"])
def test_names_and_shapes_are_those_of_torchvision(app, name, not_drawn):
    if name == "vgg16":
        widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
        places = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
        layers = zip(places, widths, [3, *widths], strict=False)
        expected = {f"features.{i}.weight": (n, n_in, 3, 3) for i, n, n_in in layers}
        expected |= {"classifier.3.weight": (4096, 4096), "classifier.6.weight": (1000, 4096)}
        expected |= {f"{name[:-6]}bias": shape[:1] for name, shape in expected.items()}
        expected |= {"classifier.0.weight": (), "classifier.0.bias": (4096,)}  # None until used
    else:
        expected = torchvision_resnet(RESNETS[name][0], 1000)
    own = chainer.serializers.npz.serialize(app.models.create(name, 1000))
    names = app.models.torchvision.NAMES[name]
    assert {names[key]: array.shape for key, array in own.items()} == expected


def test_multi_node_batch_normalization_computes_with_the_same_eps(app, not_drawn):
    comm = chainermn.create_communicator("naive")
    model = chainermn.links.create_mnbn_model(app.models.create("resnet50", 3), comm)
    layers = [link for link in model.links() if isinstance(link, L.BatchNormalization)]
    assert {type(link).__name__ for link in layers} == {"MultiNodeBatchNormalization"}
    assert ({link.eps for link in layers}, len(layers)) == ({1e-5}, 53)


def test_weights_of_chainers_resnet_are_not_loaded_into_torchvisions(app, not_drawn):
    """They would fit, except for the bias, which Chainer ignores."""
    chainers, other = (
        app.models.create("resnet50", 3, ["conv1/b"]),
        app.models.create("resnet50", 3),
    )
    arrays = {f"a/{k}": v for k, v in chainer.serializers.npz.serialize(chainers).items()}
    with pytest.raises(ValueError, match=r"begin a new .*--initmodel .* and another --out$"):
        chainer.serializers.NpzDeserializer(arrays, "a/").load(other)
    chainer.serializers.NpzDeserializer(arrays, "a/").load(chainers)


def test_googlenet_without_its_auxiliary_classifiers(app, not_drawn):
    parameters = dict(app.models.ARCHITECTURES["googlenet"]().namedparams())
    own = [p.size for name, p in parameters.items() if not name.startswith(("/loss1", "/loss2"))]
    assert sum(own) == 6_998_552


def test_every_network_is_tested(app):
    assert set(app.models.ARCHITECTURES) == set(BATCHES)


SLOW = "alex", "googlenetbn", "resnet50", "resnet101", "resnet152", "vgg16"


@pytest.mark.parametrize("name", sample(BATCHES, *SLOW))
def test_scores_and_gradients(app, name, drawn_fast):
    np.random.seed(0)
    model = app.models.ARCHITECTURES[name](n_out=7)
    classifier = app.training.Classifier(model, smoothing=0.1)
    n, side = BATCHES[name]
    x = np.random.rand(n, 3, side, side).astype(np.float32)
    loss = classifier(x, np.array([3, 6][:n], np.int32))
    classifier.cleargrads()
    loss.backward()
    assert loss.dtype == np.float32
    assert all(p.grad is not None and np.isfinite(p.grad).all() for p in model.params())
    with chainer.using_config("train", False):
        assert model(x).shape == (n, 7)


@pytest.mark.parametrize("name", ["googlenetbn", "resnet50", "small"])
def test_statistics_are_float32_also_when_the_rest_is_float16(app, name, not_drawn):
    with chainer.using_config("dtype", chainer.mixed16):
        model = app.models.ARCHITECTURES[name](n_out=7)
    dtypes = {link.gamma.dtype for link in model.links() if hasattr(link, "gamma")}
    assert (model.conv1.W.dtype, dtypes) == (np.float16, {np.dtype(np.float32)})


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
