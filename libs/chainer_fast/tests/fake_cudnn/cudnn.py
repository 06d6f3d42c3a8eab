"""A stand-in for nvidia-cudnn-frontend without a GPU: NumPy computes, in host memory.

It is as strict as the frontend: graphs take their calls in a fixed order, tensors have explicit
strides, and arrays are addresses. It computes in float64. ``log`` records what was done.
"""

import ctypes
import threading
from types import SimpleNamespace

import numpy as np

data_type = SimpleNamespace(HALF=np.dtype("f2"), FLOAT=np.dtype("f4"))
heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
build_plan_policy = SimpleNamespace(HEURISTICS_CHOICE="HEURISTICS_CHOICE")
numerical_note = SimpleNamespace(
    TENSOR_CORE="TENSOR_CORE",
    DOWN_CONVERT_INPUTS="DOWN_CONVERT_INPUTS",
    REDUCED_PRECISION_REDUCTION="REDUCED_PRECISION_REDUCTION",
    NONDETERMINISTIC="NONDETERMINISTIC",
)
WORKSPACE = 48
ALIGNMENT = 16

log = []
handles = {}
# The error that build_plans raises, if any.
failure = None


class cudnnGraphNotSupportedError(RuntimeError):
    pass


class Handle:
    def __init__(self):
        self.thread = threading.get_ident()
        self.stream = 0
        self.backend_handle = id(self)


def create_handle():
    log.append("handle")
    handle = Handle()
    handles[handle.backend_handle] = handle
    return handle


def handle_at(address):
    """Return the handle at an address, but only to the thread that made it."""
    handle = handles[address]
    assert handle.thread == threading.get_ident()
    return handle


def set_stream(handle, stream):
    assert handle.thread == threading.get_ident()
    handle.stream = stream


def backend_version_string():
    return "9.99.0"


class Tensor:
    def __init__(self, uid, name="", dim=None, stride=None, dtype=None):
        self.uid = uid
        self.name, self.dim, self.stride, self.dtype = name, dim, stride, dtype
        self.is_output = False

    def get_uid(self):
        return self.uid

    def set_output(self, is_output):
        self.is_output = is_output
        return self

    def set_data_type(self, dtype):
        self.dtype = dtype
        return self

    def set_dim(self, dim):
        self.dim = tuple(dim)
        return self

    def set_stride(self, stride):
        self.stride = tuple(stride)
        return self

    def set_name(self, name):
        self.name = name
        return self

    def orders(self):
        """Return those of cuDNN's two orders of axes in which the tensor is dense."""
        found = set()
        for axes in ((0, 1, 2, 3), (0, 2, 3, 1)):
            strides = np.cumprod([1, *(self.dim[axis] for axis in axes[:0:-1])])[::-1]
            if all(self.stride[axis] == n for axis, n in zip(axes, strides, strict=True)):
                found.add(axes)
        return found

    def at(self, pointer):
        """Return the memory at an address as an array laid out like this tensor."""
        assert type(pointer) is int
        assert pointer % ALIGNMENT == 0, f"{self.name} is not aligned"
        steps = [step * self.dtype.itemsize for step in self.stride]
        span = sum((n - 1) * step for n, step in zip(self.dim, steps, strict=True))
        raw = (ctypes.c_char * (span + self.dtype.itemsize)).from_address(pointer)
        return np.ndarray(self.dim, self.dtype, raw, strides=steps)


class pygraph:
    STAGES = ("validate", "build_operation_graph", "create_execution_plans", "build_plans")

    def __init__(
        self, *, io_data_type, intermediate_data_type, compute_data_type, handle=None, **device
    ):
        assert intermediate_data_type == compute_data_type == data_type.FLOAT
        assert isinstance(handle, Handle)
        self._inputs, self._outputs = [], []
        self._stage = 0
        self._handle = handle
        # The frontend's own engine, if one was chosen in place of cuDNN's.
        self.selected_engine = None
        self.deselected = []

    def tensor(self, *, dim, stride, data_type, name):
        tensor = Tensor(1 + len(self._inputs), name, tuple(dim), tuple(stride), data_type)
        self._inputs.append(tensor)
        return tensor

    def conv_fprop(self, *, image, weight, padding, stride, dilation):
        window = Window(padding, stride, dilation)
        return self._operation("conv_fprop", [image, weight], window.y)[0]

    def conv_dgrad(self, *, loss, filter, padding, stride, dilation):
        window = Window(padding, stride, dilation)
        return self._operation("conv_dgrad", [loss, filter], window.x)[0]

    def conv_wgrad(self, *, image, loss, padding, stride, dilation):
        window = Window(padding, stride, dilation)
        return self._operation("conv_wgrad", [image, loss], window.w)[0]

    def _operation(self, name, inputs, compute, n_outputs=1):
        self.name, self._operands, self._compute = name, inputs, compute
        first = 1 + len(self._inputs)
        self._outputs = [Tensor(first + i) for i in range(n_outputs)]
        return self._outputs

    def _reach(self, stage):
        assert self.STAGES[self._stage] == stage
        self._stage += 1

    def validate(self):
        self._reach("validate")
        assert all(tensor.is_output and tensor.stride for tensor in self._outputs)

    def build_operation_graph(self):
        self._reach("build_operation_graph")
        orders = [tensor.orders() for tensor in (*self._inputs, *self._outputs)]
        assert set.intersection(*orders), "the tensors are not dense in one order of axes"

    def create_execution_plans(self, modes):
        self._reach("create_execution_plans")
        assert modes == [heur_mode.A, heur_mode.FALLBACK]

    def deselect_numeric_notes(self, notes):
        assert self.STAGES[self._stage] == "build_plans"
        self.deselected += notes

    def build_plans(self, policy):
        self._reach("build_plans")
        if failure is not None:
            raise failure
        dtype = self._operands[0].dtype.name
        log.append(("plan", self.name, dtype, frozenset(self.deselected)))
        # The first of three plans was of no use, and cuDNN keeps them in another order.
        self._plans = [SimpleNamespace(cpp_index=index) for index in (0, 2, 1)]
        self._plan_index = 1
        self._lowered_graph = LoweredGraph(self)

    def get_workspace_size(self):
        assert self._stage == len(self.STAGES)
        return WORKSPACE

    def execute(self, pointers, workspace, *, handle):
        log.append(("execute",))
        self.compute_at(pointers, workspace, handle)

    def compute_at(self, pointers, workspace, handle):
        assert handle.thread == threading.get_ident()
        tensors = {tensor.uid: tensor for tensor in (*self._inputs, *self._outputs)}
        assert set(pointers) == set(tensors)
        ctypes.memset(workspace, 0xAB, WORKSPACE)
        arrays = {tensors[uid]: tensors[uid].at(pointer) for uid, pointer in pointers.items()}
        shapes = [tensor.dim for tensor in self._outputs]
        values = [arrays[tensor].astype("f8") for tensor in self._operands]
        found = self._compute(shapes, *values)
        for tensor, value in zip(self._outputs, found, strict=True):
            assert value.shape == tensor.dim
            arrays[tensor][...] = value
        log.append((self.name, handle.stream))


class LoweredGraph:
    """The last step of ``execute``, which is not part of the frontend's public interface."""

    def __init__(self, graph):
        self._graph = graph

    def _execute_plan_at_index(self, *, var_pack, workspace, index, handle):
        assert index == 2
        self._graph.compute_at(var_pack, workspace, handle_at(handle))


class Window:
    """The positions of a filter on an image; convolutions are sums over the filter's elements."""

    def __init__(self, padding, stride, dilation):
        for pair in (padding, stride, dilation):
            assert type(pair) is list
            assert all(type(number) is int for number in pair)
        self.pad, self.stride, self.dilation = padding, stride, dilation

    def _views(self, padded, w_shape, y_shape):
        """Yield each place in a filter, and the part of all images that it sees."""
        for place in np.ndindex(*w_shape[2:]):
            cut = [
                slice(at * d, at * d + (n - 1) * s + 1, s)
                for at, d, s, n in zip(place, self.dilation, self.stride, y_shape[2:], strict=True)
            ]
            yield place, padded[:, :, cut[0], cut[1]]

    def _padded(self, x):
        return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in self.pad)])

    @staticmethod
    def _grouped(array, groups, axis):
        shape = array.shape
        return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])

    def y(self, shapes, x, w):
        (shape,) = shapes
        groups = x.shape[1] // w.shape[1]
        y = self._grouped(np.zeros(shape), groups, 1)
        filters = self._grouped(w, groups, 0)
        for (i, j), view in self._views(self._padded(x), w.shape, shape):
            seen = self._grouped(view, groups, 1)
            y += np.einsum("ngchw,gkc->ngkhw", seen, filters[..., i, j])
        return [y.reshape(shape)]

    def x(self, shapes, y, w):
        (shape,) = shapes
        groups = shape[1] // w.shape[1]
        padded = self._padded(np.zeros(shape))
        losses, filters = self._grouped(y, groups, 1), self._grouped(w, groups, 0)
        for (i, j), view in self._views(padded, w.shape, y.shape):
            part = np.einsum("ngkhw,gkc->ngchw", losses, filters[..., i, j])
            view += part.reshape(view.shape)
        rows, columns = (slice(p, p + n) for p, n in zip(self.pad, shape[2:], strict=True))
        return [padded[:, :, rows, columns]]

    def w(self, shapes, x, y):
        (shape,) = shapes
        groups = x.shape[1] // shape[1]
        w = self._grouped(np.zeros(shape), groups, 0)
        losses = self._grouped(y, groups, 1)
        for (i, j), view in self._views(self._padded(x), shape, y.shape):
            seen = self._grouped(view, groups, 1)
            w[..., i, j] = np.einsum("ngchw,ngkhw->gkc", seen, losses)
        return [w.reshape(shape)]
