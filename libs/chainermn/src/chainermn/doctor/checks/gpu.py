"""GPUs: driver, CuPy, NCCL, and whether MPI takes GPU memory."""

from __future__ import annotations

import os
from importlib import metadata

from chainermn import remedies
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup
from chainermn.transport.gpu.cuda_awareness import is_cuda_aware

#: Those for which CuPy 14 is on the package index.
OLDEST_CUDA, NEWEST_CUDA = 12, 13
#: The first compute capability, of Turing, for which CUDA 13 has code.
CUDA_13_FROM = 75


@check("GPU", "GPUs")
def gpus(setup: Setup) -> Finding:
    """Check that the driver works and this process sees a GPU, if there is any."""
    outcome = setup.probe("cuda")
    if why := outcome.failure or outcome.answer["error"]:
        return bad(
            why,
            "run nvidia-smi; after an update of the driver, restart the machine or the container; "
            "if nvidia-smi still fails, reinstall the driver",
        )
    driver = outcome.answer
    if not driver["cuda"]:
        return not_tried(
            "there is no NVIDIA driver: training runs on CPU. For GPUs, a container needs "
            "NVIDIA's container toolkit and docker run --gpus all"
        )
    if int(driver["cuda"].partition(".")[0]) < OLDEST_CUDA:
        return bad(
            f"the driver is for CUDA up to {driver['cuda']}",
            f"update the driver: CuPy 14 needs CUDA {OLDEST_CUDA} or newer",
        )
    if not driver["gpus"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
        return bad(
            f"none{because}", "unset CUDA_VISIBLE_DEVICES; a container needs docker run --gpus all"
        )
    return good(f"{', '.join(driver['gpus'])}; the driver is for CUDA up to {driver['cuda']}")


@check("GPU", "CuPy", needs=["GPUs"])
def cupy(setup: Setup) -> Finding:
    """Check that CuPy is installed, for a CUDA that has code for all GPUs, and computes."""
    driver = setup.probe("cuda").answer
    # A driver also runs code made for an older CUDA.
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
            f"{name}: CUDA 13 has no code for the {gpu}, of compute capability {oldest / 10}",
            "install the one for CUDA 12",
            f"{remedies.pip('uninstall', '-y', name)} && {install}",
        )
    outcome = setup.probe("cupy_and_nccl")
    if outcome.failure:
        found = f"{name}: {outcome.failure}"
        return bad(found, "install it with the libraries of CUDA that it needs", install)
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
    """Check that CHAINERMN_CUDA_AWARE=1 is set only where MPI moves GPU memory."""
    outcome = setup.probe("device_memory", 2)
    wanted = is_cuda_aware()
    if outcome.answer and not outcome.failure:
        note = "" if wanted else "; to let the library use that: export CHAINERMN_CUDA_AWARE=1"
        return good(f"two ranks exchange GPU memory{note}")
    why = outcome.failure or "two ranks exchange GPU memory and get wrong numbers"
    if wanted:
        return bad(
            f"CHAINERMN_CUDA_AWARE=1 is set, but MPI cannot take GPU memory: {why}",
            "use an MPI that was built for CUDA, or else",
            "unset CHAINERMN_CUDA_AWARE",
        )
    return not_tried(f"no ({why}); not needed: gradients go by NCCL, or through host memory")
