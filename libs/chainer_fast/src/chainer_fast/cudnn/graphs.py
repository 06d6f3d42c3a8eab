"""Describe convolutions and their gradients for cuDNN, from their shapes alone.

This does not need a device: from the properties of one, ``plan`` makes plans for a GPU that this
machine does not have. Shapes are Chainer's: images, channels, rows, columns. All arrays of a
computation are dense, in that order or with the channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

Shape = tuple[int, ...]
Pair = tuple[int, int]
Name = Literal["x", "w", "y"]
Launch = Callable[[Mapping[int, int], int], None]

# The frontend's names of Chainer's dtypes.
DTYPES = {"float16": "HALF", "float32": "FLOAT"}
# cuDNN's kernels have 32-bit indices.
MOST_ELEMENTS = 2**31 - 1


# The operation that computes each of the three, with the names of its inputs.
OPERATIONS: dict[Name, tuple[str, dict[str, Name]]] = {
    "y": ("conv_fprop", {"image": "x", "weight": "w"}),
    "x": ("conv_dgrad", {"loss": "y", "filter": "w"}),
    "w": ("conv_wgrad", {"image": "x", "loss": "y"}),
}


class Convolution(NamedTuple):
    """A convolution ``y`` of the images ``x`` with the filters ``w``, or one of its gradients.

    A tuple, because every call creates one and looks up its plan, which must be fast.

    Attributes
    ----------
    computes
        Array that is computed from the other two: ``y``, the gradient with respect to ``x``
        (which Chainer also calls a deconvolution), or the gradient with respect to ``w``.
    x, w, y
        Shapes. The ratio of the channels of ``x`` and ``w`` is the number of groups.
    stride, pad, dilate
        Values along rows and columns.
    dtype
        Dtype of the arrays, ``float16`` or ``float32``. All sums are in float32.
    tensor_cores
        Whether tensor cores may be used. In float32, they round factors to TF32.
    deterministic
        Whether the same inputs must always give bitwise identical results.
    channels_last
        Whether the arrays lie channels last, under the same shapes.
    """

    computes: Name
    x: Shape
    w: Shape
    y: Shape
    stride: Pair
    pad: Pair
    dilate: Pair
    dtype: str
    tensor_cores: bool = True
    deterministic: bool = False
    channels_last: bool = False

    @property
    def groups(self) -> int:
        """Number of groups of channels."""
        return self.x[1] // self.w[1]

    @property
    def is_possible(self) -> bool:
        """Whether cuDNN supports these shapes and this dtype."""
        return (
            self.dtype in DTYPES
            and all(map(fits, (self.x, self.w, self.y)))
            and min(self.pad) >= 0
            and self.groups * self.w[1] == self.x[1]
            and self.w[0] % self.groups == 0
            # With Chainer's `cover_all`, y has other sizes.
            and self.y == convolved(self.x, self.w, self.stride, self.pad, self.dilate)
        )

    def describe(self, cudnn: ModuleType, graph: Any) -> dict[str, Any]:
        """Add the operation to a graph; return its tensors, inputs and result, by name."""
        data_type = _data_type(cudnn, self.dtype)
        operation, names = OPERATIONS[self.computes]
        tensors: dict[str, Any] = {}
        for name in names.values():
            shape = getattr(self, name)
            tensors[name] = graph.tensor(
                dim=shape, stride=self.strides(shape), data_type=data_type, name=name
            )
        result = getattr(graph, operation)(
            **{parameter: tensors[name] for parameter, name in names.items()},
            padding=list(self.pad),
            stride=list(self.stride),
            dilation=list(self.dilate),
        )
        # The inputs do not always determine the shape, and the order must not be inferred.
        shape = getattr(self, self.computes)
        result.set_output(True).set_data_type(data_type).set_name(self.computes)
        result.set_dim(shape).set_stride(self.strides(shape))
        return {**tensors, self.computes: result}

    def strides(self, shape: Shape) -> Shape:
        """Return the strides, in elements, of an array of this computation."""
        if not self.channels_last:
            return dense(shape)
        n, c, h, w = dense((shape[0], *shape[2:], shape[1]))
        return n, w, c, h


@dataclass(frozen=True)
class Plan:
    """cuDNN's plan to solve a problem on a certain device.

    Attributes
    ----------
    graph
        Graph of the frontend.
    tensors
        Inputs and result of the graph, by name.
    uids
        Numbers of these tensors in the graph, in the same order.
    workspace
        Bytes of workspace that the plan needs.
    launch
        Function that computes, given the tensors' addresses by number and that of a workspace.
    """

    graph: Any
    tensors: Mapping[str, Any]
    uids: tuple[int, ...]
    workspace: int
    launch: Launch


def plan(cudnn: ModuleType, problem: Convolution, **device: Any) -> Plan:
    """Let cuDNN make a plan for a problem.

    Parameters
    ----------
    cudnn
        Module of nvidia-cudnn-frontend.
    problem
        Problem that cuDNN supports; see `Convolution.is_possible`.
    **device
        A ``handle``, or a ``device_property`` for a device that this machine does not have.

    Raises
    ------
    RuntimeError
        If cuDNN finds no plan. The message says what to do.
    """
    graph = cudnn.pygraph(
        io_data_type=_data_type(cudnn, problem.dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **device,
    )
    try:
        tensors = problem.describe(cudnn, graph)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(_unwanted(cudnn, problem))
        graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(
            f"cuDNN {cudnn.backend_version_string()} was expected to compute {problem}, but "
            f"finds no way on this device: {error}. Under chainer.using_config('use_cudnn', "
            "'never') Chainer's own code computes it."
        ) from error
    return Plan(
        graph,
        tensors,
        uids=tuple(tensor.get_uid() for tensor in tensors.values()),
        workspace=graph.get_workspace_size(),
        launch=launcher(graph, device.get("handle")),
    )


def launcher(graph: Any, handle: Any) -> Launch:
    """Return the last step of a graph's ``execute``, or all of it if that step is missing.

    The other steps are for arrays that know their shapes. For addresses they are useless and take
    ten times as long as the last one, which is not part of the frontend's interface.

    Parameters
    ----------
    graph
        Graph of the frontend, with a plan.
    handle
        Handle for which the plan was made.
    """
    try:
        step = graph._lowered_graph._execute_plan_at_index
        index = graph._plans[graph._plan_index].cpp_index
        of_cudnn = handle.backend_handle
        # The frontend's own engines do not have this step.
        is_there = index is not None and graph.selected_engine is None
    except AttributeError:
        is_there = False
    if not is_there:
        return lambda pointers, workspace: graph.execute(pointers, workspace, handle=handle)
    # Pass arguments by name, so that a changed signature is an error.
    return lambda pointers, workspace: step(
        var_pack=pointers, workspace=workspace, index=index, handle=of_cudnn
    )


def convolved(x: Shape, w: Shape, stride: Pair, pad: Pair, dilate: Pair) -> Shape:
    """Return the shape of the convolution of images ``x`` with filters ``w``."""
    return (
        x[0],
        w[0],
        (x[2] + 2 * pad[0] - dilate[0] * (w[2] - 1) - 1) // stride[0] + 1,
        (x[3] + 2 * pad[1] - dilate[1] * (w[3] - 1) - 1) // stride[1] + 1,
    )


def dense(shape: Shape) -> Shape:
    """Return the strides of a dense array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _data_type(cudnn: ModuleType, dtype: str) -> Any:
    return getattr(cudnn.data_type, DTYPES[dtype])


def _unwanted(cudnn: ModuleType, problem: Convolution) -> list[Any]:
    notes = cudnn.numerical_note
    unwanted = [notes.DOWN_CONVERT_INPUTS, notes.REDUCED_PRECISION_REDUCTION]
    if not problem.tensor_cores:
        unwanted.append(notes.TENSOR_CORE)
    if problem.deterministic:
        unwanted.append(notes.NONDETERMINISTIC)
    return unwanted


def fits(shape: Shape) -> bool:
    """Return whether there are any elements and cuDNN can index them all."""
    return min(shape) > 0 and math.prod(shape) <= MOST_ELEMENTS
