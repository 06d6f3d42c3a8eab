"""Check GPUs: the driver, CuPy, NCCL, and whether MPI takes GPU memory."""

from __future__ import annotations

import os
from importlib import metadata

from chainermn import remedies
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup
from chainermn.transport.gpu.cuda_awareness import is_cuda_aware

#: CUDA versions for which the package index has CuPy 14.
OLDEST_CUDA, NEWEST_CUDA = 12, 13
#: Lowest compute capability that CUDA 13 supports: 7.5, Turing.
CUDA_13_FROM = 75


@check("GPU", "GPUs")
def gpus(setup: Setup) -> Finding:
    """Check that the driver, if there is one, works and that this process sees a GPU."""
    outcome = setup.probe("cuda")
    if why := outcome.failure or outcome.answer["error"]:
        return bad(
            why,
            "run nvidia-smi; after a driver update, restart the machine or the container; if "
            "nvidia-smi still fails, reinstall the driver",
        )
    driver = outcome.answer
    if not driver["cuda"]:
        return not_tried(
            "there is no NVIDIA driver: training runs on CPU. To use GPUs in a container, install "
            "NVIDIA's container toolkit and use docker run --gpus all"
        )
    if int(driver["cuda"].partition(".")[0]) < OLDEST_CUDA:
        return bad(
            f"the driver only supports CUDA up to {driver['cuda']}",
            f"update the driver: CuPy 14 needs CUDA {OLDEST_CUDA} or newer",
        )
    if not driver["gpus"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
        return bad(
            f"this process sees none{because}",
            "unset CUDA_VISIBLE_DEVICES; in a container, use docker run --gpus all",
        )
    return good(f"{', '.join(driver['gpus'])}; the driver supports CUDA up to {driver['cuda']}")


@check("GPU", "CuPy", needs=["GPUs"])
def cupy(setup: Setup) -> Finding:
    """Check that CuPy works, and that its version of CUDA supports all GPUs."""
    driver = setup.probe("cuda").answer
    # A driver also runs code built for an older CUDA.
    major = min(NEWEST_CUDA, int(driver["cuda"].partition(".")[0]))
    oldest = min(driver["capabilities"])
    if oldest < CUDA_13_FROM:
        major = OLDEST_CUDA
    install = remedies.pip("install", f"cupy-cuda{major}x[ctk]>=14")
    name, *_ = metadata.packages_distributions().get("cupy", [""])
    if not name:
        return bad("not installed", "install it", install)
    if oldest < CUDA_13_FROM and name == f"cupy-cuda{NEWEST_CUDA}x":
        gpu = driver["gpus"][driver["capabilities"].index(oldest)]
        return bad(
            f"{name}: CUDA 13 does not support the {gpu} (compute capability {oldest / 10})",
            "install the build for CUDA 12",
            f"{remedies.pip('uninstall', '-y', name)} && {install}",
        )
    outcome = setup.probe("cupy_and_nccl")
    if outcome.failure:
        found = f"{name}: {outcome.failure}"
        return bad(found, "install it with the CUDA libraries that it needs", install)
    return good(f"{name} {outcome.answer['version']}, CUDA {outcome.answer['runtime']}")


@check("GPU", "NCCL", needs=["CuPy"])
def nccl(setup: Setup) -> Finding:
    """Check that CuPy finds NCCL."""
    answer = setup.probe("cupy_and_nccl").answer
    if not answer["nccl"]:
        major = answer["runtime"].partition(".")[0]
        install = remedies.pip("install", f"nvidia-nccl-cu{major}>=2.27")
        return bad(answer["nccl error"], "install it", install)
    return good(answer["nccl"])


@check("GPU", "CUDA-aware MPI", needs=["CuPy", "two ranks"])
def cuda_aware(setup: Setup) -> Finding:
    """Check that CHAINERMN_CUDA_AWARE=1 is set only if MPI can move GPU memory."""
    outcome = setup.probe("device_memory", 2)
    wanted = is_cuda_aware()
    if outcome.answer and not outcome.failure:
        note = "" if wanted else "; to use this, run: export CHAINERMN_CUDA_AWARE=1"
        return good(f"two ranks exchange GPU memory{note}")
    why = outcome.failure or "two ranks exchanged GPU memory and got wrong numbers"
    if wanted:
        return bad(
            f"CHAINERMN_CUDA_AWARE=1 is set, but MPI cannot take GPU memory: {why}",
            "use an MPI that was built for CUDA, or run",
            "unset CHAINERMN_CUDA_AWARE",
        )
    return not_tried(
        f"no ({why}); it is not needed: gradients travel by NCCL or through host memory"
    )
