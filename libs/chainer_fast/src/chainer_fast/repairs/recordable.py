"""Give steps with CUDA graphs ways to compute that a graph can record.

CuPy refuses cuBLAS and cuRAND while a stream records. All other steps compute as ever.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from chainer_compat import surgery
from chainer_fast.graphs.drawing import draws
from chainer_fast.graphs.philox import PHILOX
from chainer_fast.matrix_products import can_multiply, the_products

# Threads side by side read and write elements side by side.
_DROPOUT = """
const long long quarter = (n + 3) / 4;
chainer_fast_word words[4];
chainer_fast_philox(key[0], key[1], call, (chainer_fast_word)i, words);
for (int k = 0; k < 4; ++k) {
    const long long j = i + k * quarter;
    if (j < n) {
        const T factor = (words[k] >> 8) * 0x1p-24f >= ratio ? scale : T(0);
        mask[j] = factor;
        y[j] = x[j] * factor;
    }
}
"""


def multiply_by_own_cublas(module: ModuleType) -> None:
    """Compute CuPy's products of matrices with a handle and a workspace of our own."""
    array = module.cupy.ndarray
    _replace(array, array, "dot", "dot", {"out"})
    _replace(array, array, "__matmul__", "matmul", set())
    _replace(array, module.cupy, "matmul", "matmul", {"out"})
    _replace(array, module.cupy, "tensordot", "tensordot", {"axes"})


def _replace(array: Any, owner: Any, name: str, method: str, options: set[str]) -> None:
    """Let a method of Products compute what a function does, if it has only these options."""
    original = getattr(owner, name)

    @surgery.replaces(owner, name)
    def product(a: Any, b: Any, *args: Any, **kwds: Any) -> Any:
        if (
            draws() is None
            or not (isinstance(a, array) and isinstance(b, array))
            or not (a.ndim and b.ndim and can_multiply(a.dtype, b.dtype))
            or not kwds.keys() <= options
        ):
            return original(a, b, *args, **kwds)
        return getattr(the_products(), method)(a, b, *args, **kwds)

    if isinstance(owner, ModuleType):  # such as a function of CuPy without a name for pickles
        product.__module__, product.__qualname__ = owner.__name__, name


def drop_by_counting(module: ModuleType) -> None:
    """Draw dropout's masks by Philox, from a key in GPU memory."""
    original, cuda = module.Dropout.forward_gpu, module.cuda

    @surgery.replaces(module.Dropout, "forward_gpu")
    def forward_gpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        found, (x,) = draws(), inputs
        if found is None or self.mask is not None:
            return original(self, inputs)
        kernel = cuda.elementwise(
            "raw T x, raw uint64 key, uint32 call, float32 ratio, T scale, int64 n",
            "raw T mask, raw T y",
            _DROPOUT,
            "chainer_fast_dropout",
            preamble=PHILOX,
        )
        self.mask, y = (cuda.cupy.empty(x.shape, x.dtype) for _ in range(2))
        ratio = self.dropout_ratio
        scale = x.dtype.type(1 / (1 - ratio))
        args = (x, found.key, found.next_call(), ratio, scale, x.size, self.mask, y)
        kernel(*args, size=-(-x.size // 4))
        return (y,)
