"""What cuDNN is to compute: problems of one operation each, which know nothing but shapes.

Nothing here needs a device: with the properties of one, ``plan`` makes plans for a GPU that is
not there. All arrays are dense, in Chainer's order: images, channels, rows, columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

Shape = tuple[int, ...]
Pair = tuple[int, int]
Outputs = Mapping[str, tuple[Shape, str]]

# Chainer's name of a dtype, and the frontend's.
DTYPES = {"float16": "HALF", "float32": "FLOAT"}
# The indices of cuDNN's kernels are of 32 bits.
MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on arrays of given shapes: as it is hashable, the key of a plan.

    Attributes
    ----------
    dtype
        Of the arrays: ``float16`` or ``float32``. All is added up in float32.
    tensor_cores
        Whether they may be used. For float32 they round what they multiply to TF32.
    deterministic
        Whether the same inputs have to give the same result to the last bit.
    """

    dtype: str
    tensor_cores: bool = True
    deterministic: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether cuDNN takes shapes and dtypes like these."""
        raise NotImplementedError

    @property
    def outputs(self) -> Outputs:
        """The shape and dtype of every array that is computed, by name."""
        raise NotImplementedError

    def describe(self, cudnn: ModuleType, graph: Any) -> dict[str, Any]:
        """Add the operation to a graph; return its tensors, inputs and outputs, by name."""
        raise NotImplementedError

    def _tensor(
        self, cudnn: ModuleType, graph: Any, name: str, shape: Shape, dtype: str | None = None
    ) -> Any:
        data_type = _data_type(cudnn, dtype or self.dtype)
        return graph.tensor(dim=shape, stride=dense(shape), data_type=data_type, name=name)

    def _mark_outputs(self, cudnn: ModuleType, tensors: Mapping[str, Any]) -> None:
        # The shape cannot always be told from the inputs, and an order must not be inferred.
        for name, (shape, dtype) in self.outputs.items():
            tensor = tensors[name].set_output(True).set_data_type(_data_type(cudnn, dtype))
            tensor.set_dim(shape).set_stride(dense(shape)).set_name(name)


@dataclass(frozen=True, kw_only=True)
class Convolution(Problem):
    """A convolution ``y`` of the images ``x`` with the filters ``w``, or one of its gradients.

    Attributes
    ----------
    computes
        Which of the three is computed from the other two: ``y``, the gradient with respect to
        ``x`` (which is also what Chainer calls a deconvolution), or that with respect to ``w``.
    x, w, y
        Shapes. That ``x`` has more channels than ``w`` says how many groups there are.
    stride, pad, dilate
        Along rows and columns.
    """

    computes: Literal["x", "w", "y"]
    x: Shape
    w: Shape
    y: Shape
    stride: Pair
    pad: Pair
    dilate: Pair

    @property
    def groups(self) -> int:
        """How many groups of channels there are."""
        return self.x[1] // self.w[1]

    @property
    def is_possible(self) -> bool:
        """Whether cuDNN takes shapes and dtypes like these."""
        return (
            self.dtype in DTYPES
            and all(map(fits, (self.x, self.w, self.y)))
            and min(self.pad) >= 0
            and self.groups * self.w[1] == self.x[1]
            and self.w[0] % self.groups == 0
            # Other sizes of y are those of Chainer's `cover_all`.
            and self.y == convolved(self.x, self.w, self.stride, self.pad, self.dilate)
        )

    @property
    def outputs(self) -> Outputs:
        """The shape and dtype of every array that is computed, by name."""
        return {self.computes: (getattr(self, self.computes), self.dtype)}

    def describe(self, cudnn: ModuleType, graph: Any) -> dict[str, Any]:
        """Add the operation to a graph; return its tensors, inputs and outputs, by name."""
        tensors = {
            name: self._tensor(cudnn, graph, name, getattr(self, name))
            for name in ("x", "w", "y")
            if name != self.computes
        }
        geometry = {
            "padding": list(self.pad),
            "stride": list(self.stride),
            "dilation": list(self.dilate),
        }
        if self.computes == "y":
            result = graph.conv_fprop(image=tensors["x"], weight=tensors["w"], **geometry)
        elif self.computes == "x":
            result = graph.conv_dgrad(loss=tensors["y"], filter=tensors["w"], **geometry)
        else:
            result = graph.conv_wgrad(image=tensors["x"], loss=tensors["y"], **geometry)
        tensors[self.computes] = result
        self._mark_outputs(cudnn, tensors)
        return tensors


@dataclass(frozen=True)
class Plan:
    """How cuDNN solves a problem on a certain device.

    Attributes
    ----------
    graph
        The frontend's graph, to be executed.
    tensors
        Its inputs and outputs, by name.
    workspace
        How many bytes it needs besides.
    """

    graph: Any
    tensors: Mapping[str, Any]
    workspace: int


def plan(cudnn: ModuleType, problem: Problem, **device: Any) -> Plan:
    """Have cuDNN plan how it solves a problem.

    Parameters
    ----------
    cudnn
        The module of nvidia-cudnn-frontend.
    problem
        One that is possible.
    **device
        A ``handle``, or a ``device_property`` for a device that is not there.

    Raises
    ------
    RuntimeError
        If cuDNN knows no way; it says what to do.
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
    return Plan(graph, tensors, graph.get_workspace_size())


def convolved(x: Shape, w: Shape, stride: Pair, pad: Pair, dilate: Pair) -> Shape:
    """Return the shape of what a convolution makes of images ``x`` with filters ``w``."""
    rows, columns = (
        (x[2 + axis] + 2 * pad[axis] - dilate[axis] * (w[2 + axis] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    )
    return x[0], w[0], rows, columns


def dense(shape: Shape) -> Shape:
    """Return the strides of a dense array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _data_type(cudnn: ModuleType, dtype: str) -> Any:
    return getattr(cudnn.data_type, DTYPES[dtype])


def _unwanted(cudnn: ModuleType, problem: Problem) -> list[Any]:
    notes = cudnn.numerical_note
    unwanted = [notes.DOWN_CONVERT_INPUTS, notes.REDUCED_PRECISION_REDUCTION]
    if not problem.tensor_cores:
        unwanted.append(notes.TENSOR_CORE)
    if problem.deterministic:
        unwanted.append(notes.NONDETERMINISTIC)
    return unwanted


def fits(shape: Shape) -> bool:
    """Return whether cuDNN can index all elements, of which there is one at least."""
    return min(shape) > 0 and math.prod(shape) <= MOST_ELEMENTS
