"""Changes in h5py 3, protobuf 4, SciPy and ONNX."""

import contextlib
import importlib.util
from types import ModuleType
from typing import Any

import numpy

from chainer_compat import surgery


def h5py_returns_bytes() -> bool:
    import h5py

    return int(h5py.__version__.split(".")[0]) >= 3


def protobuf_has_no_generated_descriptors() -> bool:
    import google.protobuf

    return int(google.protobuf.__version__.split(".")[0]) >= 4


def onnx_has_no_mapping() -> bool:
    return importlib.util.find_spec("onnx.mapping") is None


def has_scipy() -> bool:
    # Importing it would take longer than everything else, at every import of Chainer.
    with contextlib.suppress(ValueError):  # already loaded in an unusual way
        if importlib.util.find_spec("scipy") is None:
            raise ImportError("No module named 'scipy'")
    return True


def decode_strings(module: ModuleType) -> None:
    """Decode strings that are read from an HDF5 file."""
    call = module.HDF5Deserializer.__call__

    @surgery.replaces(module.HDF5Deserializer, "__call__")
    def wrapped(self: Any, key: str, value: Any) -> Any:
        if isinstance(value, str) and self.group is not None and key in self.group:
            dataset = self.group[key]
            if dataset.shape is not None:
                return dataset.asstr()[()]
        return call(self, key, value)


def build_messages(module: ModuleType) -> None:
    """Build the messages of caffe.proto from the serialized description in Chainer's file."""
    from google.protobuf import descriptor_pool
    from google.protobuf.internal import builder

    loader: Any = module.__loader__
    # The file is not executed; the description is the one constant that starts like this.
    constants = loader.get_code(module.__name__).co_consts
    start = "\n\x0bcaffe.proto"
    serialized = next(c for c in constants if isinstance(c, str) and c.startswith(start))

    file = descriptor_pool.Default().AddSerializedFile(serialized.encode("latin-1"))
    names = vars(module)
    names["DESCRIPTOR"] = file
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, module.__name__, names)


def multiply_in_float32(module: ModuleType) -> None:
    """Multiply sparse float16 matrices in float32, as Chainer does on a GPU."""
    matmul = module._coo_matmul_cpu

    @surgery.replaces(module, "_coo_matmul_cpu")
    def wrapped(data: Any, row: Any, col: Any, shape: Any, dense: Any, dtype: Any) -> Any:
        return matmul(_at_least_32(data), row, col, shape, _at_least_32(dense), dtype)


def provide_mapping(module: ModuleType) -> None:
    """Let the module see ``onnx.mapping``, with the two tables that Chainer uses."""
    import onnx
    from onnx import helper

    dtypes = map(numpy.dtype, "?bhilqBHILQefd")
    mapping: Any = ModuleType("onnx.mapping")
    mapping.NP_TYPE_TO_TENSOR_TYPE = {d: helper.np_dtype_to_tensor_dtype(d) for d in dtypes}
    # Types that are not in this table are stored as raw bytes.
    mapping.STORAGE_TENSOR_TYPE_TO_FIELD = {}
    substitutes = {"onnx": surgery.view(onnx, mapping=mapping), "onnx.mapping": mapping}
    surgery.substitute_imports(module, substitutes)


def _at_least_32(array: Any) -> Any:
    return array.astype(numpy.promote_types(array.dtype, numpy.float32), copy=False)
