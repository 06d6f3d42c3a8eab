"""The table of repairs, and the function that applies it and that of ``chainer_fast``."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from chainer_compat import settings
from chainer_compat.repairs import (
    cupy14,
    deprecations,
    iterators,
    libraries,
    mnist,
    nep50,
    numpy2,
    serializers,
    setuptools82,
    streams,
    vision,
    workers,
    writers,
)

When = Literal["before", "after", "instead"]


@dataclass(frozen=True)
class Repair:
    """A fault in one of Chainer's modules, and its repair.

    Attributes
    ----------
    name
        Name in the report and in ``CHAINER_COMPAT_SKIP``.
    module
        Module of Chainer to repair.
    cause
        Cause of the fault, in one line.
    fault
        Function that returns whether the fault is present. It raises ImportError if the library
        that would cause it is missing.
    function
        Function that changes the module.
    when
        Whether to change the module before or after its own code runs, or instead of it.
    option
        Environment variable that switches the repair on. None means that it is always on.
    """

    name: str
    module: str
    cause: str
    fault: Callable[[], bool]
    function: Callable[[ModuleType], None]
    when: When = "after"
    option: str | None = None

    def status(self) -> tuple[str, str]:
        """Return a word, such as ``active``, ``off`` or ``not needed``, and the reason."""
        if self.name in settings.skipped():
            return "skipped", "named in CHAINER_COMPAT_SKIP"
        if self.option is not None and not settings.is_on(self.option):
            return "off", f"{self.option}=1 switches it on: {self.cause}"
        try:
            fault = self.fault()
        except ImportError as error:
            return "not applicable", str(error)
        return ("active", self.cause) if fault else ("not needed", f"not so here: {self.cause}")


@functools.cache
def accelerations() -> ModuleType | None:
    """Return the registry of ``chainer_fast``, or None if that is not installed."""
    is_there = importlib.util.find_spec("chainer_fast")
    return importlib.import_module("chainer_fast.registry") if is_there else None


def all_repairs() -> tuple[Repair, ...]:
    """Return the repairs of this package, then the table of ``chainer_fast``."""
    fast = accelerations()
    return (*REPAIRS, *fast.REPAIRS) if fast else REPAIRS


def apply_repairs(module: ModuleType, when: When) -> int:
    """Apply the repairs that a module needs now, and return their number.

    Raises
    ------
    RuntimeError
        If a repair fails. The message names the repair and says how to skip it.
    """
    count = 0
    for repair in all_repairs():
        if repair.module != module.__name__ or repair.when != when:
            continue
        try:
            if repair.status()[0] == "active":
                repair.function(module)
                count += 1
        except Exception as error:
            raise RuntimeError(
                f"chainer_compat could not apply the repair {repair.name!r} to "
                f"{repair.module} (it is made for Chainer 7.8.1): {error}. "
                f"CHAINER_COMPAT_SKIP={repair.name} leaves it out."
            ) from error
    return count


def _assumed() -> bool:
    """Assume a fault of Chainer 7.8.1 itself, or one that only a network would show."""
    return True


REPAIRS = (
    Repair(
        "environment-check",
        "chainer._environment_check",
        "numpy.distutils and pkg_resources are gone or deprecated",
        _assumed,
        setuptools82.no_environment_check,
        "instead",
    ),
    *(
        Repair(
            f"{what}-requirements",
            f"chainer.testing.{module}",
            "pkg_resources is gone or deprecated",
            setuptools82.lacks_pkg_resources,
            setuptools82.provide_requirements,
            "before",
        )
        for what, module in (("testing", "helper"), ("doctest", "doctest_helper"))
    ),
    Repair(
        "as-strided-sctypes",
        "chainer.functions.array.as_strided",
        "numpy.sctypes is gone",
        numpy2.lacks_sctypes,
        numpy2.provide_sctypes,
        "before",
    ),
    Repair(
        "resize-images-float",
        "chainer.functions.array.resize_images",
        "numpy.float is gone",
        numpy2.lacks_float,
        numpy2.use_float64,
    ),
    Repair(
        "categorical-meshgrid",
        "chainer.distributions.categorical",
        "numpy.meshgrid returns a tuple",
        numpy2.meshgrid_is_a_tuple,
        numpy2.index_by_a_tuple,
    ),
    Repair(
        "pad-sequence-unsigned",
        "chainer.functions.array.pad_sequence",
        "a negative number no longer fits an unsigned array",
        numpy2.refuses_integers_out_of_range,
        numpy2.wrap_padding,
    ),
    Repair(
        "debug-print-device",
        "chainer.variable",
        "NumPy arrays have a device, 'cpu'",
        numpy2.arrays_have_a_device,
        numpy2.print_cpu_in_capitals,
    ),
    Repair(
        "summary-float64",
        "chainer.reporter",
        "0.0 + float16 stays a float16 (NEP 50)",
        nep50.zero_no_longer_widens,
        nep50.summarize_in_float64,
    ),
    Repair(
        "micro-average-float64",
        "chainer.training.extensions.micro_average",
        "0 + float16 stays a float16 (NEP 50)",
        nep50.zero_no_longer_widens,
        nep50.average_in_float64,
    ),
    Repair(
        "gradient-clipping-float64",
        "chainer.optimizer_hooks.gradient_clipping",
        "0 + float16 stays a float16 (NEP 50)",
        nep50.zero_no_longer_widens,
        nep50.clip_in_float64,
    ),
    *(
        Repair(
            f"{module.rpartition('.')[2].replace('_', '-')}-scalars",
            f"chainer.functions.{module}",
            "a number of NumPy's, such as a numpy.float64, widens an array (NEP 50)",
            nep50.float64_scalars_widen,
            nep50.plain_numbers(class_name),
        )
        for module, class_name in nep50.TAKE_NUMBERS.items()
    ),
    Repair(
        "hyperparameter-scalars",
        "chainer.optimizer",
        "a number of NumPy's, such as a numpy.float64, widens an array (NEP 50)",
        nep50.float64_scalars_widen,
        nep50.plain_hyperparameters,
    ),
    Repair(
        "convert-maximum-out",
        "chainer.dataset.convert",
        "numpy.maximum deprecates a third positional argument",
        deprecations.third_argument_of_maximum_warns,
        deprecations.pass_out_by_name,
    ),
    Repair(
        "fix-trunc",
        "chainer.functions.math.fix",
        "numpy.fix is deprecated",
        deprecations.fix_warns,
        deprecations.fix_is_trunc,
    ),
    Repair(
        "maxout-shape",
        "chainer.links.activation.maxout",
        "assigning to an array's shape is deprecated",
        deprecations.setting_a_shape_warns,
        deprecations.reshape_for_initializers,
    ),
    Repair(
        "multiprocess-iterator-daemon",
        "chainer.iterators.multiprocess_iterator",
        "Thread.setDaemon is deprecated",
        deprecations.set_daemon_warns,
        deprecations.set_daemon_by_attribute,
    ),
    Repair(
        "multiprocess-iterator-failures",
        "chainer.iterators.multiprocess_iterator",
        "the iterator waits forever for a worker that fails or is killed",
        _assumed,
        workers.raise_failures,
    ),
    *(
        Repair(
            f"{module.replace('_', '-')}-without-output",
            f"chainer.training.extensions.{module}",
            "sys.stdout is None, and has no method write",
            streams.there_is_no_output,
            streams.print_nowhere,
            "before",
        )
        for module in ("print_report", "progress_bar")
    ),
    Repair(
        "multiprocess-iterator-orders",
        "chainer.iterators.multiprocess_iterator",
        "two threads draw from NumPy's global generator; a snapshot or copy changes what is read",
        _assumed,
        iterators.draw_from_own_generator,
    ),
    Repair(
        "multithread-iterator-snapshot",
        "chainer.iterators.multithread_iterator",
        "after a snapshot, the order that has been read ahead is drawn again",
        _assumed,
        iterators.keep_what_was_drawn,
    ),
    *(
        Repair(
            f"{kind}-iterator-empty",
            f"chainer.iterators.{kind}_iterator",
            "an iterator without examples divides by zero",
            _assumed,
            iterators.refuse_to_repeat_nothing(f"{kind.capitalize()}Iterator"),
        )
        for kind in ("serial", "multithread", "multiprocess")
    ),
    Repair(
        "hdf5-strings",
        "chainer.serializers.hdf5",
        "h5py 3 returns strings as bytes",
        libraries.h5py_returns_bytes,
        libraries.decode_strings,
    ),
    Repair(
        "hdf5-own-content",
        "chainer.serializers.hdf5",
        "an HDF5 file can lead to other files, and claim more data than it has",
        serializers.files_can_reach_others,
        serializers.read_hdf5_safely,
    ),
    Repair(
        "npz-no-code",
        "chainer.serializers.npz",
        "an NPZ file can hold pickles, which can run any program",
        _assumed,
        serializers.read_npz_safely,
    ),
    Repair(
        "snapshot-writers",
        "chainer.training.extensions.snapshot_writers",
        "writers with a thread or process write arrays that training changes, and lose failures",
        _assumed,
        writers.write_copies,
    ),
    Repair(
        "caffe-protobuf",
        "chainer.links.caffe.protobuf3.caffe_pb2",
        "protobuf 4 refuses descriptors written out in Python",
        libraries.protobuf_has_no_generated_descriptors,
        libraries.build_messages,
        "instead",
    ),
    Repair(
        "sparse-matmul-float16",
        "chainer.functions.math.sparse_matmul",
        "scipy.sparse has no float16",
        libraries.has_scipy,
        libraries.multiply_in_float32,
    ),
    *(
        Repair(
            f"onnx-{what}",
            f"onnx_chainer.{module}",
            "onnx.mapping is gone",
            libraries.onnx_has_no_mapping,
            libraries.provide_mapping,
            "before",
        )
        for what, module in (
            ("export", "export"),
            ("constants", "context"),
            ("array-functions", "functions.array"),
            ("math-functions", "functions.math"),
        )
    ),
    Repair(
        "mnist-mirrors",
        "chainer.dataset.download",
        "yann.lecun.com no longer serves MNIST",
        _assumed,
        mnist.fetch_from_mirrors,
    ),
    *(
        Repair(
            f"{network}-torchvision",
            f"chainer.links.model.vision.{network}",
            "the hosts of its Caffe model are gone, and PyTorch's files are not understood",
            _assumed,
            function,
        )
        for network, function in (
            ("resnet", vision.take_torchvisions_resnet),
            ("vgg", vision.take_torchvisions_vgg),
            ("googlenet", vision.refuse_torchvisions_googlenet),
        )
    ),
    Repair(
        "cudnn-warning",
        "chainer.backends.cuda",
        "CuPy 14 has no cuDNN, and no reinstallation brings it",
        cupy14.cupy_is_14,
        cupy14.no_cudnn_warning,
    ),
    Repair(
        "parallel-updater-float16",
        "chainer.training.updaters.multiprocess_parallel_updater",
        "CuPy 14 includes float16 only for float16 arguments",
        cupy14.cupy_is_14,
        cupy14.include_float16,
    ),
    Repair(
        "negative-sampling-atomic-add",
        "chainer.functions.loss.negative_sampling",
        "atomicAdd is a template in CuPy 14",
        cupy14.cupy_is_14,
        cupy14.cast_negative_sampling,
    ),
    Repair(
        "hierarchical-softmax-atomic-add",
        "chainer.links.loss.hierarchical_softmax",
        "atomicAdd is a template in CuPy 14",
        cupy14.cupy_is_14,
        cupy14.cast_hierarchical_softmax,
    ),
)
