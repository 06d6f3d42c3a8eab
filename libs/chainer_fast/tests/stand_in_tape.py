"""A stand-in for CuPy that records on a tape, as a GPU records a graph.

Its arrays are NumPy arrays of a class of their own. While a stream captures, nothing is written to
memory: calls go on a tape, with the addresses of their arrays and the values of their numbers.
Launching the tape does it all. A look at a value in a capture is an error, as with CUDA.
"""

import contextlib
from types import SimpleNamespace

import chainer
import numpy as np

from libs.chainer_fast.tests.stand_in_kernels import Array, Kernel


class Tape(list):
    """What a capture has recorded; ``launch`` does it."""

    recording = None

    def __init__(self):
        super().__init__()
        self.kept = []  # memory that only addresses refer to

    def launch(self, stream):
        for call in self:
            call()


def do(call):
    """Do something now, or record it."""
    if Tape.recording is None:
        call()
    else:
        Tape.recording.append(call)


def plain(value):
    if isinstance(value, GpuArray):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return value


def result_of(compute, *inputs):
    """Return what is computed as new arrays, or as views of the inputs; and record it."""
    found = compute()
    if isinstance(found, tuple):
        return tuple(result_of(lambda k=k: compute()[k], *inputs) for k in range(len(found)))
    if not isinstance(found, (np.ndarray, np.generic)):
        return found
    if any(isinstance(each, np.ndarray) and np.may_share_memory(each, found) for each in inputs):
        return found.view(GpuArray)
    array = np.array(found)
    if Tape.recording is not None:
        if array.dtype.kind == "f":
            array[...] = np.nan  # not computed yet
        Tape.recording.append(lambda: np.copyto(array, compute()))
    return array.view(GpuArray)


def flat(values):
    for each in values:
        yield from flat(each) if isinstance(each, (tuple, list)) else [each]


class GpuArray(Array):
    """An array in the stand-in for GPU memory."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwds):
        inputs = tuple(map(plain, inputs))
        call = getattr(ufunc, method)
        if not out:
            return result_of(lambda: call(*inputs, **kwds))
        outs = tuple(map(plain, out))
        do(lambda: call(*inputs, out=outs, **kwds))
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function, types, args, kwargs):
        args, kwargs = plain(list(args)), {name: plain(v) for name, v in kwargs.items()}
        if function is np.copyto:
            do(lambda: function(*args, **kwargs))
            return None
        return result_of(lambda: function(*args, **kwargs), *flat(args))

    def __setitem__(self, key, value):
        mine, key, value = plain(self), plain(key), plain(value)
        do(lambda: mine.__setitem__(key, value))

    def __getitem__(self, key):
        mine, key = plain(self), plain(key)
        return result_of(lambda: mine[key], mine)

    def fill(self, value):
        self[...] = value

    def _method(name):
        def method(self, *args, out=None, **kwds):
            mine, args = plain(self), plain(args)
            if out is not None:
                do(lambda: np.copyto(plain(out), getattr(mine, name)(*args, **kwds)))
                return out
            return result_of(lambda: getattr(mine, name)(*args, **kwds), mine)

        return method

    for name in ("dot", "copy", "astype", "ravel", "reshape", "sum", "max", "mean", "any"):
        locals()[name] = _method(name)

    def _look(name):
        def look(self, *args):
            if Tape.recording is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return getattr(np.ndarray, name)(self, *args)

        return look

    for name in ("__bool__", "__float__", "__int__", "item", "tolist"):
        locals()[name] = _look(name)


class TapeKernel(Kernel):
    """An elementwise kernel that can be recorded."""

    def enqueue(self, run, arrays):
        do(lambda: run() if arrays is not None else None)  # keeps the arrays alive


class Stream:
    ptr = 1

    def __init__(self, non_blocking=False):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def synchronize(self):
        if Tape.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def begin_capture(self):
        assert Tape.recording is None
        Tape.recording = Tape()

    def end_capture(self):
        tape, Tape.recording = Tape.recording, None
        return tape


class MemoryPool:
    malloc = None

    def total_bytes(self):
        return 0

    def free_all_blocks(self):
        pass


def to_gpu(array, dtype=None):
    return np.array(plain(array), dtype).view(GpuArray)


def empty(shape, dtype=np.float32):
    array = to_gpu(np.full(shape, 0xAB, np.uint8).astype(dtype))
    if Tape.recording is not None:
        Tape.recording.kept.append(array)
    return array


def filled(value):
    def make(shape, dtype=np.float32):
        return result_of(lambda: np.full(shape, value, dtype))

    return make


def filled_like(value):
    return lambda array: result_of(lambda: np.full_like(plain(array), value))


def empty_like(array, dtype=None):
    like = np.empty_like(plain(array), dtype)
    memory = empty(like.size, like.dtype)
    return np.ndarray.__new__(GpuArray, like.shape, like.dtype, plain(memory), 0, like.strides)


RANDOM = SimpleNamespace(_rk_seed=7)


class Cupy(SimpleNamespace):
    """The module; what it does not define is NumPy's, which calls the arrays' methods."""

    def __getattr__(self, name):
        return getattr(np, name)


XP = Cupy(
    ndarray=GpuArray,
    asarray=lambda array: to_gpu(array),
    empty=empty,
    zeros=filled(0),
    ones=filled(1),
    zeros_like=filled_like(0),
    ones_like=filled_like(1),
    empty_like=empty_like,
    ascontiguousarray=lambda array: array.copy(),
    get_default_memory_pool=MemoryPool,
    random=SimpleNamespace(get_random_state=lambda: RANDOM),
    cuda=SimpleNamespace(
        MemoryPool=MemoryPool,
        Stream=Stream,
        get_current_stream=Stream,
        using_allocator=lambda malloc: contextlib.nullcontext(),
    ),
)


def get_array_module(*arrays):
    """Return the module of arrays or variables."""
    arrays = [getattr(each, "array", each) for each in arrays]
    return XP if any(isinstance(each, GpuArray) for each in arrays) else np


class Gpu(chainer.backend.Device):
    """The device of these arrays."""

    xp = XP
    supported_array_types = (GpuArray,)
    create_context = staticmethod(contextlib.nullcontext)
    name = "tape"

    def __eq__(self, other):
        return isinstance(other, Gpu)

    __hash__ = None

    def send_array(self, array):
        return to_gpu(array)

    def send(self, arrays):
        return to_gpu(arrays)
