"""The table of what makes Chainer faster; ``chainer_compat`` applies it with its own repairs.

``CHAINER_COMPAT_SKIP=NAME`` switches a row off, and ``python -m chainer_compat`` shows which rows
are active, and why.
"""

import sys

from chainer_compat.registry import Repair
from chainer_compat.repairs.cupy14 import cupy_is_14
from chainer_compat.repairs.libraries import has_scipy
from chainer_fast.onednn import library
from chainer_fast.repairs import (
    bandwidth,
    channels_last,
    compute_mode,
    cudnn,
    filters,
    fusing,
    graphs,
    ideep,
    launches,
    passes,
    recordable,
    reductions,
    starting,
    waits,
)
from chainer_fast.repairs.compute_mode import CHANNELS_LAST, CUDNN

REPAIRS = (
    *(
        Repair(
            f"scipy-when-used-by-{module.rpartition('.')[2]}",
            f"chainer.{module}",
            f"scipy.{part} is slow to import, and most programs never use it",
            has_scipy,
            starting.scipy_when_used(part),
            "before",
        )
        for module, part in starting.USERS_OF_SCIPY.items()
    ),
    Repair(
        "onednn-default",
        "chainer",
        "use_ideep is 'auto' unless CHAINER_USE_IDEEP is set",
        ideep.onednn_may_compute,
        ideep.compute_with_onednn,
    ),
    Repair(
        "onednn-device",
        "chainer.backends._cpu",
        "oneDNN's results are not a numpy.ndarray, which chainer.testing expects on @numpy",
        ideep.onednn_is_there,
        ideep.results_are_arrays_of_the_cpu,
    ),
    Repair(
        "onednn-batch-normalization-axis",
        "chainer.functions.normalization.batch_normalization",
        "Chainer lets iDeep normalize by channel, whatever the axis is",
        ideep.onednn_is_there,
        ideep.only_by_channel,
    ),
    Repair(
        "onednn-function-inputs",
        "chainer.function_node",
        "functions other than some of Chainer's own expect NumPy arrays",
        ideep.onednn_is_there,
        ideep.numpy_for_others,
    ),
    Repair(
        "onednn-function-gradients",
        "chainer.function",
        "functions other than some of Chainer's own expect NumPy arrays",
        ideep.onednn_is_there,
        ideep.numpy_for_old_functions,
    ),
    Repair(
        "max-pooling-copies",
        "chainer.functions.pooling.max_pooling_nd",
        "NumPy copies the image for each place in a window, and sorts through the copies",
        passes.copies_are_made,
        passes.pool_in_place,
    ),
    Repair(
        "leaky-relu-copies",
        "chainer.functions.activation.leaky_relu",
        "NumPy gathers the negative elements, multiplies them, and puts them back",
        passes.copies_are_made,
        passes.multiply_once,
    ),
    Repair(
        "batch-normalization-copies",
        "chainer.functions.normalization.batch_normalization",
        "NumPy computes the mean twice, and the result in three arrays of its size",
        passes.copies_are_made,
        passes.normalize_in_place,
    ),
    Repair(
        "loss-scaling-waits",
        "chainer.optimizer",
        "the host waits for a GPU once for every parameter to learn whether gradients are finite",
        cupy_is_14,
        waits.look_at_all_gradients_at_once,
    ),
    Repair(
        "relu-bandwidth",
        "chainer.functions.activation.relu",
        "CuPy moves one element at a time, which uses a third of a GPU's bandwidth in float16",
        cupy_is_14,
        bandwidth.relu_at_full_bandwidth,
    ),
    Repair(
        "addition-bandwidth",
        "chainer.functions.math.basic_math",
        "CuPy moves one element at a time, which uses a third of a GPU's bandwidth in float16",
        cupy_is_14,
        bandwidth.add_at_full_bandwidth,
    ),
    Repair(
        "optimizer-launches",
        "chainer.optimizer",
        "optimizers launch one or more kernels per parameter, which takes the host longer than "
        "the GPU",
        cupy_is_14,
        launches.update_parameters_at_once,
    ),
    Repair(
        "cuda-graphs",
        "chainer.optimizer",
        "Chainer launches every kernel of every step from Python",
        graphs.can_be_asked_for,
        graphs.use_graphs_if_asked,
    ),
    Repair(
        "products-in-graphs",
        "chainer.backends.cuda",
        "CuPy refuses cuBLAS while a CUDA graph is recorded",
        cupy_is_14,
        recordable.multiply_by_own_cublas,
    ),
    Repair(
        "dropout-in-graphs",
        "chainer.functions.noise.dropout",
        "CuPy refuses cuRAND while a CUDA graph is recorded",
        cupy_is_14,
        recordable.drop_by_counting,
    ),
    *(
        Repair(
            f"cudnn-{what}",
            f"chainer.functions.{module}",
            "CuPy 14 has no cuDNN",
            cupy_is_14,
            function,
            option=CUDNN,
        )
        for what, module, function in (
            ("convolution", "connection.convolution_2d", cudnn.use_for_convolution),
            ("deconvolution", "connection.deconvolution_2d", cudnn.use_for_deconvolution),
            (
                "batch-normalization",
                "normalization.batch_normalization",
                cudnn.use_for_batch_normalization,
            ),
        )
    ),
    Repair(
        "channels-last-functions",
        "chainer.functions",
        "CuPy gives channels-last images C order",
        cupy_is_14,
        channels_last.keep_layout,
        option=CUDNN,
    ),
    Repair(
        "channels-last-reductions",
        "chainer.functions",
        "Chainer's kernels copy channels-last images to another order, or are slow with them",
        cupy_is_14,
        reductions.reduce_by_kernels,
        option=CUDNN,
    ),
    Repair(
        "compute-mode-links",
        "chainer.links.connection.convolution_2d",
        "links made under compute_mode='cudnn_fast' take images whose shape has another order",
        compute_mode.links_have_modes,
        compute_mode.make_ordinary_links,
    ),
    Repair(
        "compute-mode-default",
        "chainer",
        "compute_mode is 'cudnn_fast': float16 images lie channels last",
        cupy_is_14,
        compute_mode.start_with_channels_last,
        option=CHANNELS_LAST,
    ),
    *(
        Repair(
            f"channels-last-{what}-filters",
            f"chainer.functions.connection.{what}_2d",
            "filters lie in Chainer's order, which every channels-last convolution has to change",
            cupy_is_14,
            filters.lay_out_filters,
            # No option: without cuDNN, they refuse channels last.
        )
        for what in ("convolution", "deconvolution")
    ),
    Repair(
        "channels-last-set",
        "chainer.backends.cuda",
        "CuPy refuses to copy host memory to arrays whose channels lie last",
        cupy_is_14,
        filters.set_channels_last,
        option=CUDNN,
    ),
    Repair(
        "channels-last-fusing",
        "chainer",  # after all others that change these functions
        "each function reads and writes all images, and a GPU's memory limits the speed",
        cupy_is_14,
        fusing.fuse_with_normalization,
        option=CUDNN,
    ),
)


def onednn() -> str:
    """Return oneDNN's version and whether Chainer uses it, or why it cannot."""
    if problem := library.why_not():
        return f"not used: {problem}"
    config = getattr(sys.modules.get("chainer"), "config", None)
    return f"{library.version()}, use_ideep is {getattr(config, 'use_ideep', None)!r}"
