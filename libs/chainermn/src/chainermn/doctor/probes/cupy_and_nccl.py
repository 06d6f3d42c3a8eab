"""Whether CuPy computes on the GPU, and which NCCL it loads."""

from __future__ import annotations


def examine() -> dict[str, str]:
    """Return the versions of CuPy, its CUDA and NCCL, or why there is no NCCL."""
    import cupy

    runtime = cupy.cuda.runtime.runtimeGetVersion()
    cupy.arange(1000).sum().get()  # raises if CuPy cannot compile for this GPU
    answer = {
        "version": str(cupy.__version__),
        "runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
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
