"""GPUs: driver, CuPy, NCCL, and whether MPI takes device memory."""

from __future__ import annotations

import os
from importlib import metadata

from chainermn import remedies
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup

#: Those for which CuPy 14 is on the package index.
OLDEST_CUDA, NEWEST_CUDA = 12, 13


@check("GPU", "CUDA driver")
def cuda_driver(setup: Setup) -> Finding:
    """Check that there is one, and it starts."""
    if setup.cuda.failure:
        return bad(setup.cuda.failure, "run nvidia-smi; reinstall the driver if that fails too")
    driver = setup.cuda.answer
    if driver["library"] and not driver["error"]:
        cuda = f"for CUDA up to {driver['library']}"
        if int(driver["library"].partition(".")[0]) < OLDEST_CUDA:
            return bad(cuda, f"update the driver: CuPy 14 needs CUDA {OLDEST_CUDA} or newer")
        return good(cuda)
    if driver["library"]:
        return bad(
            driver["error"],
            "run nvidia-smi; after an update of the driver, restart the machine or the container",
        )
    if driver["devices"]:
        return bad(
            f"{', '.join(driver['devices'])} exist, but {driver['error']}",
            "install the driver's libraries; a container needs NVIDIA's container toolkit and "
            "docker run --gpus all",
        )
    return not_tried("there is no NVIDIA driver: training runs on CPU")


@check("GPU", "GPUs", needs=["CUDA driver"])
def gpus(setup: Setup) -> Finding:
    """Check that this process sees one at least."""
    found = setup.cuda.answer["gpus"]
    if not found:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
        return bad(
            f"none{because}", "unset CUDA_VISIBLE_DEVICES; a container needs docker run --gpus all"
        )
    return good(", ".join(f"{name} ({mib / 1024:.0f} GiB)" for name, mib in found))


@check("GPU", "one GPU a rank", needs=["GPUs"])
def one_gpu_a_rank(setup: Setup) -> Finding:
    """Check that no ranks share a GPU: they would wait for each other, and NCCL refuses them."""
    count, ranks = len(setup.cuda.answer["gpus"]), setup.ranks
    if ranks is None:
        return good(f"for up to {count} ranks on this host")
    if ranks > count:
        return bad(
            f"{ranks} ranks, but GPUs: {count}",
            f"start {count} ranks on this host, and choose in each: "
            "chainer.cuda.get_device_from_id(comm.intra_rank).use()",
        )
    return good(f"{ranks} ranks, GPUs: {count}")


@check("GPU", "CuPy", needs=["GPUs"])
def cupy(setup: Setup) -> Finding:
    """Check that it is installed, once, and computes."""
    # A driver runs what is made for an older CUDA, too.
    major = min(NEWEST_CUDA, int(setup.cuda.answer["library"].partition(".")[0]))
    package = f"cupy-cuda{major}x[ctk]>=14"
    install = remedies.pip("install", package)
    installed = metadata.packages_distributions().get("cupy", [])
    if not installed:
        return bad("not installed", "install it", install)
    if len(set(installed)) > 1:
        several = sorted(set(installed))
        uninstall = remedies.pip("uninstall", "-y", *several)
        found = f"several: {', '.join(several)}"
        return bad(found, "keep one", f"{uninstall} && {install}")
    if setup.cupy.failure:
        found = f"{installed[0]}: {setup.cupy.failure}"
        return bad(found, "install it with the libraries of CUDA that it needs", install)
    answer = setup.cupy.answer
    if answer["error"]:
        found = f"{installed[0]} {answer['version']}: {answer['error']}"
        again = remedies.pip("install", "--force-reinstall", "--no-deps", package)
        return bad(found, "install it again; if that changes nothing, please report this", again)
    return good(f"{installed[0]} {answer['version']}, CUDA {answer['runtime']}")


@check("GPU", "NCCL", needs=["CuPy"])
def nccl(setup: Setup) -> Finding:
    """Check that CuPy finds it."""
    answer = setup.cupy.answer
    if not answer["nccl"]:
        major = answer["runtime"].partition(".")[0]
        install = remedies.pip("install", f"nvidia-nccl-cu{major}>=2.27")
        return bad(answer["nccl error"], "install it", install)
    return good(answer["nccl"])


@check("GPU", "CUDA-aware MPI", needs=["CuPy", "two ranks"])
def cuda_aware(setup: Setup) -> Finding:
    """Let MPI add up device memory; one that cannot crashes, or gives wrong numbers."""
    outcome = setup.probe_ranks("device_memory")
    if outcome.answer == "right" and not outcome.failure:
        return good("two ranks add up device memory")
    found = outcome.failure or "two ranks add up device memory and get wrong numbers"
    for name in ("MV2_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED"):
        if os.environ.get(name, "0") not in ("", "0"):
            return bad(
                f"{name} is set, but {found}",
                f"use an MPI that was built for CUDA, or unset {name}",
            )
    return not_tried(
        f"no ({found}); not needed: gradients go by NCCL, or by way of host memory "
        "with the communicator non_cuda_aware"
    )
