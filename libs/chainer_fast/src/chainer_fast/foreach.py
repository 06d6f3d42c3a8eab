"""Launch an elementwise kernel once for many arrays, instead of once per array as Chainer does.

The kernel for many arrays is made from the source of Chainer's, so it computes the same numbers.
"""

import functools
from collections import defaultdict
from types import ModuleType
from typing import Any

import numpy

# Number of threads that share a piece of an array, and largest number of elements in a piece.
_THREADS, _PIECE = 256, 4096

# Runs the source of a kernel on every array, cut into pieces. No kernel's names begin with all_.
_OPERATION = """
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


class Calls:
    """Collects calls of kernels, to launch as many as possible together.

    Calls must not use arrays that other calls write, and kernels must not have raw outputs.

    Parameters
    ----------
    xp
        The module CuPy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp, self._array = xp, xp.ndarray
        self._waiting: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)

    def add(self, kernel: Any, *args: Any) -> None:
        """Collect a call of a CuPy kernel, with all its arguments, including outputs."""
        array = self._array
        key = tuple(
            [
                ((arg.dtype, arg.size and arg.data.ptr) if param.raw else arg.dtype)
                if isinstance(arg, array)
                else arg
                for param, arg in zip(kernel.params, args, strict=False)
            ]
        )
        self._waiting[kernel, key].append(args)

    def run(self) -> None:
        """Launch each kernel once for all calls with the same dtypes and the same scalars."""
        waiting = list(self._waiting.items())
        self._waiting.clear()
        for (kernel, _), calls in waiting:
            self._run(kernel, calls)

    def _run(self, kernel: Any, calls: list[tuple[Any, ...]]) -> None:
        params = kernel.in_params + kernel.out_params
        kinds = tuple(
            "scalar" if not isinstance(arg, self._array) else "raw" if param.raw else "array"
            for param, arg in zip(params, calls[0], strict=True)
        )
        positions = [k for k, kind in enumerate(kinds) if kind == "array"]
        rows, together = [], []
        for args in calls:
            arrays = [args[k] for k in positions]
            n = arrays[0].size
            if all(array.size == n and array.flags.c_contiguous for array in arrays):
                if n:
                    rows.append([n, *[array.data.ptr for array in arrays]])
                    together.append(args)
            else:
                kernel(*args)
        if len(rows) < 2:
            for args in together:
                kernel(*args)
            return
        table = numpy.array([[0, *row] for row in rows], numpy.int64)
        ends = numpy.cumsum(-(-table[:, 1] // _PIECE))
        table[1:, 0] = ends[:-1]
        first = list(together[0])
        for k in positions:
            first[k] = first[k].ravel()
        on_gpu = self._xp.asarray(table.T.ravel())
        _for_all(kernel, kinds)(*first, on_gpu, len(rows), size=int(ends[-1]) * _THREADS)


class Later:
    """An array in GPU memory. Kernels that are called with it are collected instead of launched.

    CuPy passes a call on to any argument that has the method below.
    """

    def __init__(self, array: Any, calls: Calls) -> None:
        self.array, self.dtype, self.calls = array, array.dtype, calls

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any) -> None:
        self.calls.add(kernel, *[self.array if arg is self else arg for arg in args])


@functools.cache
def _for_all(kernel: Any, kinds: tuple[str, ...]) -> Any:
    """Return a kernel that takes a table of the first pieces, sizes and addresses of all arrays.

    Its other arguments are those of one call, which determine the dtypes.
    """
    declarations: list[str] = []
    pointers: list[str] = []
    elements: list[str] = []
    params = kernel.in_params + kernel.out_params
    for param, kind in zip(params, kinds, strict=True):
        dtype = param.ctype if param.dtype is None else param.dtype.name
        if kind != "array":
            declarations.append(f"{'raw ' * (kind == 'raw')}{dtype} {param.name}")
            continue
        declarations.append(f"raw {dtype} all_{param.name}")
        type_ = f"{'const ' * param.is_const}{param.ctype}"
        row = f"all_table[{2 + len(pointers)} * all_n + all_k]"
        pointers.append(f"{type_}* all_of_{param.name} = ({type_}*){row} + all_start;")
        elements.append(f"{type_}& {param.name} = all_of_{param.name}[all_i];")
    operation = _OPERATION.format(
        threads=_THREADS,
        piece=_PIECE,
        pointers="\n".join(pointers),
        elements="\n    ".join(elements),
        operation=kernel.operation,
    )
    in_params = ", ".join([*declarations, "raw int64 all_table", "int64 all_n"])
    options = {"preamble": kernel.preamble, **kernel.kwargs}
    return type(kernel)(in_params, "", operation, f"{kernel.name}_for_all", **options)
