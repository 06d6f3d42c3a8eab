"""Run oneDNN's primitives on tensors, and keep the primitives for reuse."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy

from chainer_fast.onednn import library, openmp
from chainer_fast.onednn.layouts import Layout, plain
from chainer_fast.onednn.library import Handle

#: Number of most recently used primitives to keep.
KEPT = 1024

_CPU, _IN_ORDER, _USER_SCRATCHPAD = 1, 1, 1
_SCRATCHPAD_MD, _EXEC_ARG_MD = 136, 255
_DESTROY = "dnnl_primitive_desc_destroy"


class Arg(IntEnum):
    """The role of an operand in a primitive."""

    SRC = 1
    SRC_1 = 2
    DST = 17
    WEIGHTS = 33
    BIAS = 41
    MEAN = 49
    VARIANCE = 50
    SCALE = 51
    SHIFT = 52
    WORKSPACE = 64
    SCRATCHPAD = 80
    DIFF_SRC = 129
    DIFF_DST = 145
    DIFF_WEIGHTS = 161
    DIFF_SCALE = 255
    DIFF_SHIFT = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in some layout, whose memory is a one-dimensional array."""

    layout: Layout
    buffer: numpy.ndarray

    @classmethod
    def empty(cls, layout: Layout) -> Tensor:
        """Return a tensor with undefined values."""
        return cls(layout, numpy.empty(layout.size, layout.dtype))

    @classmethod
    def of(cls, array: numpy.ndarray) -> Tensor:
        """Return an array as a tensor, without a copy if it is C-contiguous."""
        array = numpy.ascontiguousarray(array)
        return cls(plain(array.shape, array.dtype), array.reshape(-1))

    def in_layout(self, layout: Layout) -> Tensor:
        """Return the same values in another layout, or this tensor if it has that layout."""
        if self.layout is layout:
            return self
        (result,) = _reorder(self.layout, layout, here()).run({Arg.SRC: self})
        return result

    def as_array(self) -> numpy.ndarray:
        """Return the values as a C-contiguous array, without a copy if they already are one."""
        layout = self.layout
        return self.in_layout(plain(layout.shape, layout.dtype)).buffer.reshape(layout.shape)


class Primitive:
    """A compiled primitive with memory objects for its operands. For use in one thread."""

    def __init__(self, descriptor: Handle, inputs: Sequence[Arg], outputs: Sequence[Arg]) -> None:
        functions = library.load()
        found = {arg: operand(descriptor, arg) for arg in (*inputs, *outputs)}
        self.layouts = {arg: layout for arg, layout in found.items() if layout is not None}
        self._inputs = [arg for arg in inputs if arg in self.layouts]
        self._outputs = [arg for arg in outputs if arg in self.layouts]
        self._primitive = Handle("dnnl_primitive_create", "dnnl_primitive_destroy", descriptor)
        scratchpad = functions.dnnl_primitive_desc_query_md(descriptor, _SCRATCHPAD_MD, 0)
        self._scratchpad_bytes = functions.dnnl_memory_desc_get_size(scratchpad)
        self._memories = {arg: _memory(layout.handle) for arg, layout in self.layouts.items()}
        if self._scratchpad_bytes:
            self._memories[Arg.SCRATCHPAD] = _memory(scratchpad)
        self._stream = _stream()
        arguments = [library.Argument(arg, m.value) for arg, m in self._memories.items()]
        self._arguments = (library.Argument * len(arguments))(*arguments)
        self._set = functions.dnnl_memory_set_data_handle
        self._execute = functions.dnnl_primitive_execute

    def run(
        self, operands: dict[Arg, Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Convert the inputs to the primitive's layouts, and run it.

        Parameters
        ----------
        operands : dict
            Inputs. A workspace may be missing if the primitive does not need one.
        outputs : sequence of Tensor, optional
            Tensors to write to, by default new ones.

        Returns
        -------
        sequence of Tensor
            Outputs, without a workspace if the primitive does not need one.
        """
        used = []
        for arg in self._inputs:
            wanted = operands[arg].in_layout(self.layouts[arg])
            self._set(self._memories[arg], wanted.buffer.ctypes.data)
            used.append(wanted)
        if outputs is None:
            outputs = [Tensor.empty(self.layouts[arg]) for arg in self._outputs]
        for arg, tensor in zip(self._outputs, outputs, strict=True):
            self._set(self._memories[arg], tensor.buffer.ctypes.data)
        if self._scratchpad_bytes:
            scratchpad = _scratchpad(self._scratchpad_bytes)
            self._set(self._memories[Arg.SCRATCHPAD], scratchpad.ctypes.data)
        self._execute(self._primitive, self._stream, len(self._arguments), self._arguments)
        return outputs


def kept(make: Callable[..., Primitive]) -> Callable[..., Primitive]:
    """Cache the primitives that a function makes, per thread and number of threads."""
    cached = functools.lru_cache(maxsize=KEPT)(lambda place, *key: make(*key))

    @functools.wraps(make)
    def wrapped(*key: object) -> Primitive:
        return cached(here(), *key)

    return wrapped


def here() -> tuple[int, int]:
    """Return the place for which a primitive is made: this thread and OpenMP's thread count."""
    return threading.get_ident(), openmp.max_threads()


@functools.cache
def engine() -> Handle:
    """Return oneDNN's handle for the CPU."""
    return Handle("dnnl_engine_create", "dnnl_engine_destroy", _CPU, 0)


@functools.cache
def attributes() -> Handle:
    """Return attributes that make primitives use scratch memory from outside."""
    handle = Handle("dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy")
    library.load().dnnl_primitive_attr_set_scratchpad_mode(handle, _USER_SCRATCHPAD)
    return handle


def describe(kind: str, *arguments: object) -> Handle:
    """Return the descriptor of a primitive; adds the engine and the attributes."""
    create = f"dnnl_{kind}_primitive_desc_create"
    return Handle(create, _DESTROY, engine(), *arguments, attributes())


@functools.lru_cache(maxsize=KEPT)
def _reorder(source: Layout, target: Layout, place: tuple[int, int]) -> Primitive:
    create = "dnnl_reorder_primitive_desc_create"
    arguments = source.handle, engine(), target.handle, engine(), attributes()
    descriptor = Handle(create, _DESTROY, *arguments)
    return Primitive(descriptor, [Arg.SRC], [Arg.DST])


_local = threading.local()


def _stream() -> Handle:
    if not hasattr(_local, "stream"):
        arguments = engine(), _IN_ORDER
        _local.stream = Handle("dnnl_stream_create", "dnnl_stream_destroy", *arguments)
    stream: Handle = _local.stream
    return stream


def _scratchpad(n_bytes: int) -> numpy.ndarray:
    """Return this thread's scratch memory, which all its primitives share."""
    found = getattr(_local, "scratchpad", None)
    if found is None or found.nbytes < n_bytes:
        found = _local.scratchpad = numpy.empty(n_bytes, numpy.uint8)
    return found


def operand(descriptor: Handle, arg: Arg) -> Layout | None:
    """Return the layout that a primitive needs for an operand, or None without such an operand."""
    functions = library.load()
    found = functions.dnnl_primitive_desc_query_md(descriptor, _EXEC_ARG_MD, arg)
    return Layout.of(found) if functions.dnnl_memory_desc_get_size(found) else None


def _memory(descriptor: int | Handle) -> Handle:
    return Handle("dnnl_memory_create", "dnnl_memory_destroy", descriptor, engine(), None)
