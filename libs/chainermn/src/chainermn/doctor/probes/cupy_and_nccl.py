"""Whether CuPy computes on the GPU, and which NCCL it loads."""

from __future__ import annotations


def examine() -> dict[str, str]:
    """Return the version of CuPy and of its CUDA, whether it computes, and NCCL's version."""
    import cupy

    runtime = cupy.cuda.runtime.runtimeGetVersion()
    total = int((cupy.arange(1000) ** 2).sum())
    answer = {
        "version": str(cupy.__version__),
        "runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "error": "" if total == 332833500 else f"the sum of 1000 squares is {total}",
        "nccl": "",
        "nccl error": "",
    }
    try:
        from cupy.cuda import nccl

        number = nccl.get_version()
        answer["nccl"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    except Exception as error:
        answer["nccl error"] = f"{type(error).__name__}: {error}"
    return answer
