"""Which of Chainer's calls use cuDNN, and with which arguments, tested with a stand-in.

The tests replace ``forward_cpu`` instead of ``forward_gpu``, so that NumPy arrays take the path
of CuPy arrays on a GPU. Chainer computes the expected values in float64, which cuDNN never gets.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.functions.connection import convolution_2d, deconvolution_2d
from chainer.functions.normalization import batch_normalization

from chainer_fast.channels_last import layout
from chainer_fast.cudnn import graphs, normalization, padding
from chainer_fast.cudnn import runner as runners
from chainer_fast.repairs import cudnn as routes

TOLERANCES = {"float16": 1e-2, "float32": 2e-5}
CONVOLUTIONS = {"conv_fprop", "conv_dgrad", "conv_wgrad"}
NORMALIZATIONS = {"batchnorm", "batchnorm_backward"}

GEOMETRIES = {
    # name: (shape of x, output channels, size of the filter, other arguments)
    "plain": ((2, 3, 6, 5), 4, (3, 3), {}),
    "padded": ((2, 3, 6, 5), 4, (3, 2), {"pad": (1, 2)}),
    "strided": ((2, 3, 7, 9), 4, (3, 3), {"stride": (2, 3)}),
    "a rest that is left out": ((2, 3, 8, 8), 4, (3, 3), {"stride": 2}),
    "dilated": ((2, 3, 9, 8), 4, (3, 2), {"dilate": (2, 3)}),
    "grouped": ((2, 6, 6, 5), 4, (3, 3), {"groups": 2}),
    "depthwise": ((2, 3, 6, 5), 6, (2, 2), {"groups": 3, "pad": 1}),
    "points": ((3, 4, 2, 3), 5, (1, 1), {}),
    # Arrays that lie in both orders of axes at once.
    "one channel": ((2, 1, 6, 5), 1, (3, 3), {}),
    "pixels": ((2, 8, 1, 1), 8, (1, 1), {}),
    "padded pixel": ((1, 8, 1, 1), 8, (3, 3), {"pad": 1}),
    "numbers": ((2, 1, 1, 1), 1, (1, 1), {}),
    "one filter": ((2, 8, 3, 3), 1, (3, 3), {}),
    "all of it": (
        (2, 4, 11, 12),
        6,
        (3, 2),
        {"stride": (2, 1), "pad": (3, 1), "dilate": (2, 3), "groups": 2},
    ),
    "more padding than filter": ((1, 2, 3, 3), 2, (2, 2), {"pad": 4, "stride": 3}),
    "numbers of numpy's": ((1, 2, 5, 5), 2, (3, 3), {"stride": np.array([2, 1])}),
}


@pytest.fixture
def cudnn(stand_in):
    return stand_in("cudnn")


@pytest.fixture
def library(cudnn, stand_in):
    return stand_in("functions").Functions(cudnn)


@pytest.fixture
def runner(cudnn, library, stand_in, to_cudnn, monkeypatch):
    """Send Chainer's functions in host memory to the stand-in; return its runner."""
    found = runners.Runner(cudnn, stand_in("host_gpu").HostGpu())

    # oneDNN would take arrays in host memory.
    monkeypatch.setattr(chainer.global_config, "use_ideep", "never")

    # Chainer's own code for host memory does not need `cuda`.
    monkeypatch.setattr(batch_normalization, "cuda", SimpleNamespace(cupy=np))
    normalizer = normalization.Normalizer(found, library)
    to_cudnn("forward_cpu", [lambda: found], [lambda: normalizer])
    return found


def computed(cudnn):
    """Return the names of what the stand-in has computed so far, and clear its log."""
    names = [entry[0] for entry in cudnn.log if entry[0] in CONVOLUTIONS | NORMALIZATIONS]
    cudnn.log.clear()
    return names


def draw(*shapes):
    random = np.random.RandomState(0)
    return [random.uniform(-1, 1, shape) for shape in shapes]


def variables(arrays, dtype):
    return [chainer.Variable(array.astype(dtype)) for array in arrays]


def differentiate(function, arrays, dtype):
    """Return a function's value, its gradients, and gradients of their squares, in float64."""
    inputs = variables(arrays, dtype)
    y = function(*inputs)
    gradients = chainer.grad([F.sum(y * y)], inputs, enable_double_backprop=True)
    squares = sum(F.sum(gradient * gradient) for gradient in gradients)
    # cuDNN computes nothing with the bias.
    again = chainer.grad([squares], inputs[:2])
    return [np.asarray(found.array, "f8") for found in (y, *gradients, *again)]


def assert_equal(actual, expected, dtype):
    for got, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCES[dtype] * scale)


def convolution(shape, n_out, ksize, arguments):
    """Return a convolution with a bias, and its arrays."""
    w = (n_out, shape[1] // arguments.get("groups", 1), *ksize)
    # Small values, so that squares of gradients of gradients fit float16.
    arrays = [array / 4 for array in draw(shape, w, n_out)]
    return lambda x, w, b: F.convolution_2d(x, w, b, **arguments), arrays


def deconvolution(shape, n_out, ksize, arguments):
    """Return the deconvolution that makes arrays of this shape, and its arrays."""
    w = (n_out, shape[1] // arguments.get("groups", 1), *ksize)
    with chainer.no_backprop_mode():
        y = F.convolution_2d(*draw(shape, w), **arguments)
    arrays = [array / 4 for array in draw(y.shape, w, shape[1])]
    arguments = {**arguments, "outsize": shape[2:]}
    return lambda x, w, b: F.deconvolution_2d(x, w, b, **arguments), arrays


@pytest.mark.parametrize(
    "dtype, mode",
    [("float16", None), ("float32", None), ("float16", layout.MODE)],
    ids=["float16", "float32", "channels last"],
)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("make", [convolution, deconvolution], ids=["there", "and back"])
def test_convolutions_and_their_gradients(make, name, dtype, mode, runner, cudnn):
    function, arrays = make(*GEOMETRIES[name])
    # Both get inputs that have been rounded to the dtype.
    arrays = [array.astype(dtype) for array in arrays]
    expected = differentiate(function, arrays, "float64")
    assert computed(cudnn) == []
    with chainer.using_config("compute_mode", mode):
        actual = differentiate(function, arrays, dtype)
    assert_equal(actual, expected, dtype)
    done = computed(cudnn)
    assert set(done) == CONVOLUTIONS
    assert done[0] == ("conv_fprop" if make is convolution else "conv_dgrad")
    assert len(done) >= 7


def test_results_have_the_dtype_and_the_order_of_axes_of_chainers(runner, cudnn):
    x, w = variables(draw((2, 3, 6, 5), (4, 3, 3, 3)), "float16")
    y = F.convolution_2d(x, w)
    F.sum(y).backward()
    assert y.dtype == x.grad.dtype == w.grad.dtype == np.float16
    assert y.array.flags.c_contiguous
    assert computed(cudnn) == ["conv_fprop", "conv_dgrad", "conv_wgrad"]


def last(array):
    """Return a channels-last copy."""
    return layout.converted(np, array.copy())


def test_channels_last_images_and_filters_stay_so(runner, cudnn):
    """Also outside of the mode, where gradients go on with them."""
    x, w, b = of("f2", *(array / 8 for array in draw((2, 8, 6, 5), (16, 8, 3, 3), 16)))
    inputs = [chainer.Variable(last(array)) for array in (x, w)]
    with chainer.using_config("compute_mode", layout.MODE):
        y = F.convolution_2d(*inputs, b)
    gradients = chainer.grad([y], inputs, [y], enable_double_backprop=True)
    assert not runner.gpu.copied
    with chainer.using_config("compute_mode", layout.MODE):
        again = chainer.grad([sum(F.sum(g * g) for g in gradients)], inputs)
        back = F.deconvolution_2d(y, inputs[1])
    assert all(layout.is_channels_last(each.array) for each in (y, *gradients, *again, back))


@pytest.mark.parametrize("dtype, times", [("float16", 1), ("float32", 0)])
def test_a_kernel_of_our_own_adds_the_bias_of_channels_last_images(dtype, times, runner):
    """CuPy's would move one element at a time."""
    added = []
    runner.gpu.add_bias = lambda images, bias: added.append(images.shape)
    with chainer.using_config("compute_mode", layout.MODE):
        F.convolution_2d(*of(dtype, *draw((2, 8, 6, 5), (8, 8, 3, 3), 8)))
    assert added == [(2, 8, 4, 3)] * times


COPIES = {
    # Is x, is w channels last; the mode; copies; is a convolution, is a deconvolution of x?
    "nothing asks for it": (False, False, None, 0, (False, False)),
    "filters alone do not": (False, True, None, 2, (False, False)),
    # A deconvolution may be a gradient, which goes on with it.
    "images do not": (True, False, None, 2, (False, True)),
    "nor both": (True, True, None, 2, (False, True)),
    "the mode does": (False, False, layout.MODE, 4, (True, True)),
    "the mode, with such filters": (False, True, layout.MODE, 2, (True, True)),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_makes_a_convolution_channels_last(name, runner, cudnn):
    x_last, w_last, mode, copies, y_last = COPIES[name]
    x, w = of("f2", *draw((2, 8, 6, 5), (8, 8, 3, 3)))
    x, w = last(x) if x_last else x, last(w) if w_last else w
    with chainer.using_config("compute_mode", mode):
        found = [F.convolution_2d(x, w), F.deconvolution_2d(x, w)]
    assert len(runner.gpu.copied) == copies
    assert tuple(layout.is_channels_last(y.array) for y in found) == y_last
    assert computed(cudnn) == ["conv_fprop", "conv_dgrad"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mode_is_for_float16_alone(dtype, runner, cudnn):
    x, w = of(dtype, *draw((2, 8, 6, 5), (8, 8, 3, 3)))
    expected = F.convolution_2d(x, w).array
    with chainer.using_config("compute_mode", layout.MODE):
        found = F.convolution_2d(x, w).array
        assert F.convolution_2d(last(x), w).array.flags.c_contiguous or dtype == "float64"
    np.testing.assert_array_equal(found, expected)
    assert found.strides == expected.strides


def test_images_of_few_channels_are_padded(runner, cudnn):
    """Also if they are no dense array, and not in groups."""
    x, w = of("f2", *draw((2, 3, 6, 10), (8, 3, 3, 3)))
    inputs = [chainer.Variable(array) for array in (x[..., ::2], w)]
    shapes = []
    run = runner.run

    def watched(problem, *arrays):
        shapes.append((problem.x, problem.w, [array.shape for array in arrays]))
        return run(problem, *arrays)

    runner.run = watched
    with chainer.using_config("compute_mode", layout.MODE):
        y = F.convolution_2d(*inputs)
        gx, gw = chainer.grad([y], inputs)
        F.convolution_2d(x, w[:3, :1], groups=3)
    wide, filters = (2, 8, 6, 5), (8, 8, 3, 3)
    narrow = (x[..., ::2].shape, w.shape)
    assert shapes == [
        (wide, filters, [wide, filters]),
        (*narrow, [y.shape, w.shape]),
        (wide, filters, [wide, y.shape]),
        (x.shape, (3, 1, 3, 3), [x.shape, (3, 1, 3, 3)]),
    ]
    assert (gx.shape, gw.shape) == narrow
    assert layout.is_channels_last(gw.array)


@pytest.mark.parametrize(
    "change, channels",
    [
        ({}, 8),
        ({"computes": "w"}, 8),
        ({"computes": "x"}, 3),
        ({"channels_last": False}, 3),
        ({"x": (2, 8, 6, 6), "w": (6, 8, 3, 3)}, 8),
        ({"x": (2, 12, 6, 6), "w": (6, 12, 3, 3)}, 12),
        ({"w": (6, 1, 3, 3)}, 3),
        # No convolution: Chainer's error is the right answer.
        ({"w": (6, 2, 3, 3)}, 3),
        # Padded, it would have too many elements.
        ({"x": (2**24, 3, 6, 6), "y": (2**24, 6, 4, 4)}, 3),
    ],
)
def test_what_is_padded(change, channels):
    shapes = {"x": (2, 3, 6, 6), "w": (6, 3, 3, 3), "y": (2, 6, 4, 4)}
    geometry = {"stride": (1, 1), "pad": (0, 0), "dilate": (1, 1)}
    arguments = {"computes": "y", "dtype": "float16", "channels_last": True, **shapes, **geometry}
    problem = graphs.Convolution(**{**arguments, **change})
    found = padding.padded(problem)
    assert found.x[1] == channels
    assert (found is problem) == (problem.x[1] == channels)


def test_a_mode_that_chainer_does_not_have(runner):
    with (
        chainer.using_config("compute_mode", "fast"),
        pytest.raises(ValueError, match="compute_mode must be None or 'cudnn_fast', got 'fast'"),
    ):
        iterate(dtype="float16")


LAST = {"compute_mode": layout.MODE}
NOT_TAKEN = {
    "cover_all": ("float32", {}, {"cover_all": True, "stride": 2}),
    "float64": ("float64", {}, {}),
    "never": ("float32", {"use_cudnn": "never"}, {}),
    "cover_all, channels last": ("float16", LAST, {"cover_all": True, "stride": 2}),
    "never, channels last": ("float16", {"use_cudnn": "never", **LAST}, {}),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_cudnn_does_not_get_goes_chainers_way(name, runner, cudnn):
    dtype, config, arguments = NOT_TAKEN[name]
    arrays = draw((1, 2, 6, 6), (2, 2, 3, 3))

    def function(x, w):
        return F.convolution_2d(x, w, **arguments)

    expected = differentiate(function, arrays, "float64")
    with (
        chainer.using_config("use_cudnn", config.get("use_cudnn", "auto")),
        chainer.using_config("compute_mode", config.get("compute_mode")),
    ):
        actual = differentiate(function, arrays, dtype)
    assert computed(cudnn) == []
    assert_equal(actual, expected, dtype if dtype in TOLERANCES else "float32")


def test_two_dtypes_go_chainers_way(runner, cudnn):
    x, w = draw((1, 2, 5, 5), (2, 2, 3, 3))
    x, w = chainer.Variable(x.astype("f4")), chainer.Variable(w.astype("f2"))
    y = F.deconvolution_2d(F.convolution_2d(x, w), w)
    F.sum(y).backward()
    assert computed(cudnn) == []
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (np.float32, np.float32, np.float16)


@pytest.mark.parametrize(
    "route, make",
    [
        (routes.convolve, lambda _: convolution_2d.Convolution2DFunction()),
        (routes.deconvolve, lambda _: deconvolution_2d.Deconvolution2DFunction()),
        (
            routes.correlate,
            lambda w: convolution_2d.Convolution2DGradW(
                convolution_2d.Convolution2DFunction(), w.shape, w.dtype, None
            ),
        ),
    ],
    ids=["convolve", "deconvolve", "correlate"],
)
def test_other_orders_of_axes_go_chainers_way(route, make, runner, cudnn):
    x, w = (array.astype("f4") for array in draw((1, 2, 3, 3), (2, 2, 3, 3)))
    node = make(w)
    forward = route(lambda self, inputs: "its own", lambda: runner)
    inputs = (x, x[..., :1, :1]) if route is routes.correlate else (x, w)
    node._input_layouts = (chainer.memory_layouts.CUDNN_CHANNEL_LAST_X, None)
    assert forward(node, inputs) == "its own"
    node._input_layouts = (None, None)
    assert forward(node, inputs) != "its own"
    assert len(computed(cudnn)) == 1


def test_filters_that_are_to_have_another_order_of_axes_go_chainers_way(runner, cudnn):
    x, y, w = of("f4", *draw((1, 2, 3, 3), (1, 2, 1, 1), (2, 2, 3, 3)))
    layout = chainer.memory_layouts.CUDNN_CHANNEL_LAST_W
    convolution = convolution_2d.Convolution2DFunction()
    node = convolution_2d.Convolution2DGradW(convolution, w.shape, w.dtype, layout)
    node._input_layouts = (None, None)
    forward = routes.correlate(lambda self, inputs: "its own", lambda: runner)
    assert forward(node, (x, y)) == "its own"
    assert computed(cudnn) == []


def test_the_gradient_of_a_deconvolution_with_respect_to_filters_alone(runner, cudnn):
    x, w = variables(draw((1, 2, 3, 3), (2, 2, 3, 3)), "float32")
    (gradient,) = chainer.grad([F.deconvolution_2d(x, w)], [w])
    assert computed(cudnn) == ["conv_dgrad", "conv_wgrad"]
    assert gradient.shape == w.shape


def test_a_deconvolution_that_covers_all_goes_chainers_way(runner, cudnn):
    x, w = variables(draw((1, 2, 3, 3), (2, 2, 3, 3)), "float32")
    # A convolution of 6 rows has 2 positions at a stride of 2, and 3 if it covers all.
    y = F.deconvolution_2d(x, w, stride=2, outsize=(6, 6))
    F.sum(y).backward()
    assert computed(cudnn) == []


def test_an_impossible_convolution_is_refused_by_chainer(runner, cudnn):
    x, w = draw((1, 2, 2, 2), (2, 2, 3, 3))
    with pytest.raises(AssertionError, match="Height in the output should be positive"):
        F.convolution_2d(x.astype("f4"), w.astype("f4"))
    assert computed(cudnn) == []


@pytest.mark.parametrize(
    "change, possible",
    [
        ({}, True),
        ({"dtype": "float64"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"x": (0, 4, 6, 6), "y": (0, 6, 4, 4)}, False),
        ({"x": (2**20, 4, 6, 6), "y": (2**20, 6, 4, 4)}, True),
        ({"x": (2**24, 4, 6, 6), "y": (2**24, 6, 4, 4)}, False),
        ({"pad": (-1, 0), "y": (2, 6, 2, 4)}, False),
        ({"y": (2, 6, 5, 4)}, False),
        ({"w": (5, 2, 3, 3), "y": (2, 5, 4, 4)}, False),
        ({"w": (6, 3, 3, 3)}, False),
    ],
)
def test_what_is_possible(change, possible):
    shapes = {"x": (2, 4, 6, 6), "w": (6, 2, 3, 3), "y": (2, 6, 4, 4)}
    geometry = {"stride": (1, 1), "pad": (0, 0), "dilate": (1, 1)}
    arguments = {"computes": "y", "dtype": "float32", **shapes, **geometry, **change}
    assert graphs.Convolution(**arguments).is_possible == possible


@pytest.mark.parametrize(
    "view",
    [
        lambda array: np.asfortranarray(array),
        lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
        lambda array: array[::-1][::-1][:, ::-1][:, ::-1],
        lambda array: np.broadcast_to(array[:1], array.shape),
        lambda array: shifted(array),
    ],
    ids=["other order", "gaps", "to and fro", "broadcast", "not aligned"],
)
def test_arrays_that_cudnn_cannot_read_are_copied(view, runner, cudnn):
    x, w = (view(array.astype("f4")) for array in draw((2, 3, 6, 5), (4, 3, 3, 3)))
    expected = F.convolution_2d(x.astype("f8"), w.astype("f8")).array
    assert_equal([F.convolution_2d(x, w).array], [expected], "float32")
    assert computed(cudnn) == ["conv_fprop"]


def shifted(array):
    room = np.empty(array.size + 1, array.dtype)
    found = room[1:].reshape(array.shape)
    found[...] = array
    assert found.ctypes.data % runners.ALIGNMENT != 0
    return found


def iterate(shape=(1, 2, 5, 5), dtype="float32", **arguments):
    x, w = variables(draw(shape, (2, 2, 3, 3)), dtype)
    F.sum(F.convolution_2d(x, w, **arguments)).backward()


def plans(cudnn):
    found = [entry for entry in cudnn.log if entry[0] == "plan"]
    cudnn.log.clear()
    return found


def test_plans_are_made_once(runner, cudnn):
    iterate()
    assert cudnn.log[0] == "handle"
    assert cudnn.log.count("handle") == 1
    assert ("conv_fprop", 7) in cudnn.log  # on the current stream
    assert len(plans(cudnn)) == 3
    iterate()
    assert "handle" not in cudnn.log
    assert computed(cudnn) == ["conv_fprop", "conv_dgrad", "conv_wgrad"]
    for other in (
        {"shape": (2, 2, 5, 5)},
        {"dtype": "float16"},
        {"stride": 2},
        {"pad": 1},
        {"dilate": 2},
    ):
        iterate(**other)
        assert len(plans(cudnn)) == 3
        iterate(**other)
        assert len(plans(cudnn)) == 0
    with chainer.using_config("compute_mode", layout.MODE):
        for n_plans in (3, 0):
            iterate(dtype="float16")
            assert len(plans(cudnn)) == n_plans


def lack(graph):
    del graph._lowered_graph


def lack_engines_of_the_frontends(graph):
    del graph.selected_engine


def leave_the_choice_to_cudnn(graph):
    graph._plans[graph._plan_index].cpp_index = None


def choose_an_engine_of_the_frontends(graph):
    graph.selected_engine = object()


@pytest.mark.parametrize(
    "change",
    [
        lack,
        lack_engines_of_the_frontends,
        leave_the_choice_to_cudnn,
        choose_an_engine_of_the_frontends,
    ],
)
def test_the_frontend_executes_where_its_last_step_alone_will_not_do(
    change, runner, cudnn, monkeypatch
):
    build_plans = cudnn.pygraph.build_plans

    def build_and_change(graph, policy):
        build_plans(graph, policy)
        change(graph)

    def results():
        inputs = variables(draw((1, 2, 5, 5), (2, 2, 3, 3)), "float32")
        y = F.convolution_2d(*inputs)
        return [y.array, *(found.array for found in chainer.grad([y], inputs))]

    expected = results()
    assert ("execute",) not in cudnn.log
    monkeypatch.setattr(cudnn.pygraph, "build_plans", build_and_change)
    runner.gpu.number = 1  # this device has no plans yet
    assert all((got == wanted).all() for got, wanted in zip(results(), expected, strict=True))
    assert cudnn.log.count(("execute",)) == 3


def test_work_goes_to_the_stream_that_is_current(runner, cudnn):
    x, w = of("f4", *draw((1, 2, 5, 5), (2, 2, 3, 3)))
    places = [(0, 7), (0, 8), (1, 8), (0, 8), (1, 7), (0, 7)]  # (device, stream)
    for runner.gpu.number, runner.gpu.current_stream in places:
        F.convolution_2d(x, w)
    streams = [entry[1] for entry in cudnn.log if entry[0] == "conv_fprop"]
    assert streams == [stream for _, stream in places]
    assert len(plans(cudnn)) == 2


def test_the_oldest_plans_are_dropped_when_the_device_has_nothing_to_do(
    runner, cudnn, monkeypatch
):
    monkeypatch.setattr(runners, "PLANS_KEPT", 3)
    iterate()
    assert runner.gpu.synchronized == 0
    iterate(pad=1)
    assert runner.gpu.synchronized == 3
    plans(cudnn)
    iterate(pad=1)
    assert plans(cudnn) == []
    iterate()
    assert len(plans(cudnn)) == 3


def test_plans_that_are_used_are_kept(runner, cudnn, monkeypatch):
    monkeypatch.setattr(runners, "PLANS_KEPT", 2)
    x, w = (array.astype("f4") for array in draw((1, 2, 5, 5), (2, 2, 3, 3)))
    made = []
    for pad in (0, 1, 0, 2, 0, 1):
        F.convolution_2d(x, w, pad=pad)
        made.append(len(plans(cudnn)))
    assert made == [1, 1, 0, 1, 0, 1]


def test_every_device_and_every_thread_has_a_handle_of_its_own(runner, cudnn):
    iterate()
    runner.gpu.number = 1
    iterate()
    assert cudnn.log.count("handle") == 2
    barrier = threading.Barrier(2)

    def work(_):
        barrier.wait(10)
        x, w = (array.astype("f4") for array in draw((1, 2, 5, 5), (2, 2, 3, 3)))
        with chainer.using_device("@numpy"):
            return F.convolution_2d(x, w).array

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    assert (first == second).all()
    assert cudnn.log.count("handle") == 4


@pytest.mark.parametrize(
    "dtype, config, unwanted",
    [
        ("float16", {}, set()),
        ("float32", {}, {"TENSOR_CORE"}),
        ("float32", {"use_cudnn_tensor_core": "always"}, set()),
        ("float16", {"use_cudnn_tensor_core": "never"}, {"TENSOR_CORE"}),
        ("float16", {"cudnn_deterministic": True}, {"NONDETERMINISTIC"}),
    ],
)
def test_settings_of_chainers(dtype, config, unwanted, runner, cudnn):
    values = {"use_cudnn_tensor_core": "auto", "cudnn_deterministic": False, **config}
    iterate(dtype=dtype)  # these plans must not serve other settings
    first = {"TENSOR_CORE"} if dtype == "float32" else set()
    always = {"DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"}
    assert {entry[3] for entry in plans(cudnn)} == {frozenset(always | first)}
    with (
        chainer.using_config("use_cudnn_tensor_core", values["use_cudnn_tensor_core"]),
        chainer.using_config("cudnn_deterministic", values["cudnn_deterministic"]),
    ):
        iterate(dtype=dtype)
    expected = [] if unwanted == first else [frozenset(always | unwanted)] * 3
    assert [entry[3] for entry in plans(cudnn)] == expected


@pytest.mark.parametrize("name", ["use_cudnn", "use_cudnn_tensor_core"])
def test_a_setting_that_chainer_does_not_have(name, runner):
    with (
        chainer.using_config(name, "sometimes"),
        pytest.raises(ValueError, match=f"{name} must be 'always', .*, got 'sometimes'"),
    ):
        iterate()


def test_a_failure_of_cudnns_says_what_to_do(runner, cudnn):
    cudnn.failure = cudnn.cudnnGraphNotSupportedError("no engine")
    with pytest.raises(RuntimeError, match=r"no engine.* 'never'") as caught:
        iterate()
    assert "computes='y'" in str(caught.value)
    assert "9.99.0" in str(caught.value)


def normalize(x, gamma, beta, **arguments):
    return F.batch_normalization(x, gamma, beta, **arguments)


def normalization_arrays(shape=(3, 8, 4, 5)):
    x, gamma, beta = draw(shape, shape[1], shape[1])
    return [x * np.arange(1, shape[1] + 1)[:, None, None], gamma + 2, beta]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_batch_normalization_and_its_gradients(dtype, runner, cudnn):
    arrays = normalization_arrays()
    arrays[0] = arrays[0].astype(dtype)
    weights = draw(arrays[0].shape)[0]

    def results(dtype):
        x, gamma, beta = variables(arrays, dtype)
        if dtype == "float16":  # what Chainer calls mixed precision
            gamma, beta = variables(arrays[1:], "float32")
        averages = [np.full(8, value, gamma.dtype) for value in (0.5, 2)]
        y = F.batch_normalization(
            x,
            gamma,
            beta,
            running_mean=averages[0],
            running_var=averages[1],
            decay=np.float64(0.75),
            eps=0.1,
        )
        loss = F.sum(F.cast(y * y, "float32") * weights.astype("f4"))
        gradients = chainer.grad([loss], [x, gamma, beta], enable_double_backprop=True)
        squares = sum(F.sum(F.cast(g * g, "float32")) for g in gradients)
        again = chainer.grad([squares], [x, gamma])
        arrays_ = [found.array for found in (y, *gradients, *again)]
        return [found.dtype for found in arrays_], [*arrays_, *averages]

    _, expected = results("float64")
    assert computed(cudnn) == []
    dtypes, actual = results(dtype)
    # The gradients of gradients pass through y once more.
    assert computed(cudnn) == ["batchnorm", "batchnorm_backward", "batchnorm_backward"]
    assert dtypes == [np.dtype(name) for name in (dtype, dtype, "f4", "f4", dtype, "f4")]
    if dtype == "float16":  # squares of gradients are too large to compare in float16
        actual, expected = [found[:4] + found[6:] for found in (actual, expected)]
    assert_equal([np.asarray(array, "f8") for array in actual], expected, dtype)


def test_a_failure_to_normalize_says_what_to_do(runner, library):
    library.status = 3000
    with pytest.raises(
        RuntimeError, match=r"ForwardTraining of cuDNN 9\.99\.0 .*_PARAM.* 'never'"
    ):
        normalize(*of("f4", *normalization_arrays()))


def test_every_thread_normalizes_by_a_handle_of_its_own(runner, cudnn):
    arrays = normalization_arrays()
    expected = normalize(*arrays).array
    with ThreadPoolExecutor(1) as pool:
        found = [
            pool.submit(normalize, *of("f4", *arrays)).result(),
            normalize(*of("f4", *arrays)),
        ]
    assert [entry for entry in cudnn.log if entry == "handle"] == ["handle"] * 2
    assert_equal([y.array for y in found], [expected] * 2, "float32")


def test_batch_normalization_without_averages(runner, cudnn):
    arrays = normalization_arrays((3, 7, 4, 5))
    expected = normalize(*arrays).array
    y = normalize(*(array.astype("f4") for array in arrays))
    assert computed(cudnn) == ["batchnorm"]
    assert_equal([y.array], [expected], "float32")


def of(dtype, *arrays):
    return [array.astype(dtype) for array in arrays]


NOT_NORMALIZED = {
    "one value": lambda: normalize(*of("f4", *normalization_arrays((1, 8, 1, 1)))),
    "averages with gaps": lambda: normalize(
        *of("f4", *normalization_arrays()),
        running_mean=np.zeros((8, 2), "f4")[:, 0],
        running_var=np.zeros((8, 2), "f4")[:, 0],
    ),
    "float64": lambda: normalize(*normalization_arrays()),
    "float16 throughout": lambda: normalize(*of("f2", *normalization_arrays())),
    "other averages": lambda: normalize(
        *of("f4", *normalization_arrays()),
        running_mean=np.zeros(8, "f8"),
        running_var=np.zeros(8, "f8"),
    ),
    "vectors": lambda: normalize(*of("f4", *draw((3, 8), 8, 8))),
    "another axis": lambda: normalize(*of("f4", *draw((3, 8, 4, 8), 8, 8)), axis=(0, 1, 2)),
    "two axes": lambda: normalize(*of("f4", *draw((3, 8, 4, 5), (8, 4), (8, 4)))),
    "given statistics": lambda: F.fixed_batch_normalization(
        *of("f4", *normalization_arrays(), np.zeros(8), np.ones(8))
    ),
}


@pytest.mark.filterwarnings("ignore:A batch with no more than one sample")
@pytest.mark.parametrize("name", NOT_NORMALIZED)
def test_what_is_normalized_by_chainer(name, runner, cudnn):
    assert np.isfinite(NOT_NORMALIZED[name]().array).all()
    assert computed(cudnn) == []


def test_gpus_before_turing_compute_by_chainers_code_alone(runner, cudnn):
    runner.gpu.of_capability = 70
    cudnn.failure = cudnn.cudnnGraphNotSupportedError("no kernel image for this device")
    x, w = variables(draw((1, 2, 5, 5), (2, 2, 3, 3)), "float32")
    y = F.convolution_2d(x, w)
    F.sum(F.deconvolution_2d(y, w)).backward()
    normalize(*of("f4", *normalization_arrays()))
    assert computed(cudnn) == []
    assert np.isfinite(w.grad).all()


def test_arrays_in_host_memory_are_normalized_there(runner, cudnn, monkeypatch):
    monkeypatch.setattr(batch_normalization.cuda, "cupy", object())
    normalize(*of("f4", *normalization_arrays()))
    assert computed(cudnn) == []


def test_another_implementation_that_chainer_chooses_stays(runner):
    class Own:
        pass

    module = SimpleNamespace(_impl_selector=lambda *_: "iDeep", GeneralBatchNormalizationImpl=Own)
    assert routes.select_normalization(module, lambda: runner)(None, None) == "iDeep"


def test_other_orders_of_axes_are_normalized_by_chainer(runner):
    inputs = of("f4", *normalization_arrays())
    node = batch_normalization.BatchNormalization()
    node.key_axis = (1,)
    own = batch_normalization.GeneralBatchNormalizationImpl
    for order, is_own in ((None, False), (chainer.memory_layouts.CUDNN_CHANNEL_LAST_X, True)):
        node._input_layouts = (order, None, None)
        assert (type(node._impl_selector(node, inputs)) is own) == is_own


def test_cudnn_may_be_left_out_of_batch_normalization(runner, cudnn):
    with chainer.using_config("use_cudnn", "never"):
        normalize(*of("f4", *normalization_arrays()))
    assert computed(cudnn) == []


def test_asking_for_cudnn_without_the_frontend_is_an_error(python, fake_cupy):
    code = "import sys; sys.modules['cudnn'] = None; import chainer"
    asked = {"PYTHONPATH": fake_cupy, "CHAINER_COMPAT_CUDNN": "1"}
    errors = python(code, fails=True, **asked)
    assert "nvidia-cudnn-frontend is not installed" in errors
    assert "pip install 'nvidia-cudnn-frontend>=1.32' 'nvidia-cudnn-cu13>=9'" in errors
    # Without CuPy, there is nothing for cuDNN to compute.
    python("import sys; sys.modules['cupy'] = None; " + code, CHAINER_COMPAT_CUDNN="1")


def test_cudnn_is_not_loaded_before_it_is_used(python, fake_cupy, fake_cudnn):
    path = os.pathsep.join((fake_cupy, fake_cudnn))
    code = "import chainer, sys; print('cudnn' in sys.modules)"
    assert python(code, PYTHONPATH=path, CHAINER_COMPAT_CUDNN="1") == "False"
