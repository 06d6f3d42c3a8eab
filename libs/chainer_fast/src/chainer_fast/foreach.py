"""Launch an elementwise kernel once for many arrays, instead of once per array as Chainer does.

The kernel for many arrays is made from the source of Chainer's, so it computes the same numbers.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy

from chainer_fast.channels_last.layout import lie_alike, raveled

# Number of threads that share a piece of an array, and largest number of elements in a piece.
_THREADS, _PIECE = 256, 4096

# Runs the source of a kernel on every array, cut into pieces. No kernel's names begin with all_.
_OPERATION = """
{skip}
const long long all_piece = i / {threads};
long long all_k = 0;
for (long long all_end = all_n; all_end - all_k > 1;) {{
    const long long all_middle = (all_k + all_end) / 2;
    (all_table[all_middle] <= all_piece ? all_k : all_end) = all_middle;
}}
const long long all_start = (all_piece - all_table[all_k]) * {piece};
const long long all_rest = all_table[all_n + all_k] - all_start;
{pointers}
for (long long all_i = i % {threads}; all_i < all_rest && all_i < {piece}; all_i += {threads}) {{
    {elements}
    {operation};
}}
"""


class Call(NamedTuple):
    """An argument of a call: which collection of calls, which of the owner's calls, and which."""

    collection: int
    call: int
    argument: int


class Place(NamedTuple):
    """Where a number comes from: whoever makes the call, and the argument."""

    owner: int
    call: Call


class Recording(Protocol):
    """What calls need to be recorded in a CUDA graph.

    Attributes
    ----------
    skip : array of bool without axes
        Kernels do nothing if it is true.
    """

    skip: Any

    def upload(self, array: Any) -> Any:
        """Return a copy in GPU memory, which is filled before the graph is launched."""

    def numbers(self, places: Sequence[Place], values: Sequence[Any], dtype: Any) -> Any:
        """Return an array in GPU memory for numbers that are written before each launch."""


class Calls:
    """Collects calls of kernels, to launch as many as possible together.

    Calls must not use arrays that other calls write, and kernels must not have raw outputs.

    Parameters
    ----------
    xp
        The module CuPy.
    recording
        By default, scalars become part of the launch. In a recording they lie in GPU memory.
    number
        Number of this collection of calls in the recording.
    """

    #: Number of whoever makes the next calls.
    owner = 0

    def __init__(
        self, xp: ModuleType, recording: Recording | None = None, number: int = 0
    ) -> None:
        self._xp, self._array, self._recording = xp, xp.ndarray, recording
        self._number = number
        self._waiting: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        self._whose: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
        self._n_calls: defaultdict[int, int] = defaultdict(int)

    def add(self, kernel: Any, *args: Any) -> None:
        """Collect a call of a CuPy kernel, with all its arguments, including outputs."""
        array, is_recorded = self._array, self._recording is not None
        key = tuple(
            [
                ((arg.dtype, arg.size and arg.data.ptr) if param.raw else arg.dtype)
                if isinstance(arg, array)
                else is_recorded or arg
                for param, arg in zip(kernel.params, args, strict=False)
            ]
        )
        self._waiting[kernel, key].append(args)
        if is_recorded:
            self._whose[kernel, key].append((self.owner, self._n_calls[self.owner]))
            self._n_calls[self.owner] += 1

    def numbers(self) -> dict[Call, Any]:
        """Return the scalars of the calls of one owner, and forget the calls."""
        found = {
            Call(self._number, call, k): arg
            for key, calls in self._waiting.items()
            for (_, call), args in zip(self._whose[key], calls, strict=True)
            for k, arg in enumerate(args)
            if not isinstance(arg, self._array)
        }
        self._waiting.clear()
        self._whose.clear()
        self._n_calls.clear()
        return found

    def run(self) -> None:
        """Launch each kernel once for all calls with the same dtypes and the same scalars."""
        waiting = list(self._waiting.items())
        self._waiting.clear()
        for key, calls in waiting:
            self._run(key[0], calls, self._whose.pop(key, []))
        self._n_calls.clear()

    def _run(
        self, kernel: Any, calls: list[tuple[Any, ...]], whose: list[tuple[int, int]]
    ) -> None:
        params = kernel.in_params + kernel.out_params
        recording = self._recording
        kinds = tuple(
            ("scalar" if recording is None else "number")
            if not isinstance(arg, self._array)
            else "raw"
            if param.raw
            else "array"
            for param, arg in zip(params, calls[0], strict=True)
        )
        positions = [k for k, kind in enumerate(kinds) if kind == "array"]
        rows, together, owners = [], [], []
        for index, args in enumerate(calls):
            arrays = [args[k] for k in positions]
            n = arrays[0].size
            if all(array.size == n for array in arrays) and lie_alike(arrays):
                if n:
                    rows.append([n, *[array.data.ptr for array in arrays]])
                    together.append(args)
                    owners.append(whose[index] if whose else (0, 0))
            elif recording is None:
                kernel(*args)
            else:
                raise ValueError("arrays in different orders cannot be updated in a graph")
        if not rows:
            return
        if len(rows) < 2 and recording is None:
            kernel(*together[0])
            return
        table = numpy.array([[0, *row] for row in rows], numpy.int64)
        ends = numpy.cumsum(-(-table[:, 1] // _PIECE))
        table[1:, 0] = ends[:-1]
        first = list(together[0])
        for k in positions:
            first[k] = raveled(first[k])
        upload: Callable[[Any], Any] = self._xp.asarray if recording is None else recording.upload
        on_gpu = upload(table.T.ravel())
        more: tuple[Any, ...] = ()
        if recording is not None:
            for k, kind in enumerate(kinds):
                if kind == "number":
                    number = self._number
                    of_calls = [Place(owner, Call(number, call, k)) for owner, call in owners]
                    values = [args[k] for args in together]
                    dtype = _dtype_of(params, k, together[0], self._array)
                    first[k] = recording.numbers(of_calls, values, dtype)
            more = (recording.skip,)
        for_all = _for_all(kernel, kinds, bool(more))
        for_all(*first, on_gpu, len(rows), *more, size=int(ends[-1]) * _THREADS)


class Later:
    """An array in GPU memory. Kernels that are called with it are collected instead of launched.

    CuPy passes a call on to any argument that has the method below.
    """

    def __init__(self, array: Any, calls: Calls) -> None:
        self.array, self.dtype, self.calls = array, array.dtype, calls

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any) -> None:
        self.calls.add(kernel, *[self.array if arg is self else arg for arg in args])


def _dtype_of(params: Any, k: int, args: Any, array: Any) -> Any:
    """Return the dtype that a scalar gets: that of its parameter, as CuPy finds it."""
    if params[k].dtype is not None:
        return numpy.dtype(params[k].dtype)
    for param, arg in zip(params, args, strict=True):
        if param.ctype == params[k].ctype and isinstance(arg, array):
            return arg.dtype
    return numpy.result_type(args[k])


@functools.cache
def _for_all(kernel: Any, kinds: tuple[str, ...], may_skip: bool) -> Any:
    """Return a kernel that takes a table of the first pieces, sizes and addresses of all arrays.

    Its other arguments are those of one call, which determine the dtypes; for a number, an array
    with that of each call.
    """
    declarations: list[str] = []
    pointers: list[str] = []
    numbers: list[str] = []
    elements: list[str] = []
    params = kernel.in_params + kernel.out_params
    for param, kind in zip(params, kinds, strict=True):
        dtype = param.ctype if param.dtype is None else param.dtype.name
        if kind in ("raw", "scalar"):
            declarations.append(f"{'raw ' * (kind == 'raw')}{dtype} {param.name}")
            continue
        declarations.append(f"raw {dtype} all_{param.name}")
        if kind == "number":
            numbers.append(f"const {param.ctype} {param.name} = all_{param.name}[all_k];")
            continue
        type_ = f"{'const ' * param.is_const}{param.ctype}"
        row = f"all_table[{2 + len(pointers)} * all_n + all_k]"
        pointers.append(f"{type_}* all_of_{param.name} = ({type_}*){row} + all_start;")
        elements.append(f"{type_}& {param.name} = all_of_{param.name}[all_i];")
    operation = _OPERATION.format(
        skip="if (all_skip[0]) return;" * may_skip,
        threads=_THREADS,
        piece=_PIECE,
        pointers="\n".join([*pointers, *numbers]),
        elements="\n    ".join(elements),
        operation=kernel.operation,
    )
    declarations += ["raw int64 all_table", "int64 all_n", *["raw bool all_skip"] * may_skip]
    options = {"preamble": kernel.preamble, **kernel.kwargs}
    name = f"{kernel.name}_for_all{'_recorded' * may_skip}"
    return type(kernel)(", ".join(declarations), "", operation, name, **options)
