"""Check MPI on this host: the library, its ``mpiexec``, and a job of two ranks."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from chainermn import remedies
from chainermn.doctor.probe import Outcome
from chainermn.doctor.registry import Finding, bad, check, good
from chainermn.doctor.setup import Setup
from chainermn.launch.mpiexec import (
    NAMES,
    MpiError,
    find_mpiexec,
    flavor_of,
    launch_settings,
    mpi4py_library,
    mpiexec_candidates,
    mpiexec_command,
    mpiexec_version,
)

#: Docker's default of 64 MiB is too little for data-loading workers and NCCL.
LEAST_SHARED_MEMORY = 128 * 2**20
# Variables that make mpi4py ask MPI for a lower thread level.
_THREAD_LEVELS = ("MPI4PY_RC_THREAD_LEVEL", "MPI4PY_RC_THREADS")


@check("MPI", "mpiexec")
def mpiexec(setup: Setup) -> Finding:
    """Check that there is an mpiexec from MPICH or Open MPI."""
    candidates = mpiexec_candidates()
    remedy, command = "install an MPI, for example", remedies.install_mpi()
    if not candidates:
        return bad("none beside this Python or on PATH", remedy, command)
    found = ", ".join(f"{path} ({NAMES[flavor_of(path)]})" for path in candidates)
    if not any(map(flavor_of, candidates)):
        return bad(f"{found}: {mpiexec_version(candidates[0])[:200]}", remedy, command)
    return good(found)


@check("MPI", "mpi4py", blames=["mpiexec"])
def mpi4py(setup: Setup) -> Finding:
    """Check that mpi4py can be imported and that it loads an MPI library."""
    try:
        return good(mpi4py_library())
    except MpiError as error:
        return bad(error.found, error.remedy, error.command)


@check("MPI", "mpiexec of that MPI", needs=["mpiexec", "mpi4py"])
def same_mpi(setup: Setup) -> Finding:
    """Check that mpiexec belongs to mpi4py's MPI: otherwise ranks do not find each other."""
    try:
        right = find_mpiexec()
    except MpiError as error:
        return bad(error.found, error.remedy, error.command)
    typed = shutil.which("mpiexec")
    if typed is None:
        return good(f"{right}; it is not on PATH, but chainermn launch finds it")
    if flavor_of(Path(typed)) != flavor_of(right):
        found = (
            f"the mpiexec on PATH is {typed} ({NAMES[flavor_of(Path(typed))]}), "
            f"but mpi4py uses {NAMES[flavor_of(right)]}"
        )
        if right.name != "mpiexec":  # Debian adds the name of the MPI
            return bad(found, f"start jobs with chainermn launch, or with {right}")
        remedy = "start jobs with chainermn launch, or put the right mpiexec first on PATH"
        return bad(found, remedy, f'export PATH={shlex.quote(str(right.parent))}:"$PATH"')
    return good(str(right))


@check("MPI", "/dev/shm")
def shared_memory_left(setup: Setup) -> Finding:
    """Check that ranks, data-loading workers and NCCL have enough shared memory."""
    free = shutil.disk_usage("/dev/shm").free
    shown = f"{free / 2**20:,.0f} MiB free"
    if free < LEAST_SHARED_MEMORY:
        return bad(
            f"{shown}, less than {LEAST_SHARED_MEMORY / 2**20:.0f} MiB",
            "start a container with docker run --shm-size=1g, or --ipc=host; elsewhere, as root",
            "mount -o remount,size=1g /dev/shm",
        )
    return good(shown)


@check("MPI", "two ranks", needs=["mpiexec of that MPI"], blames=["/dev/shm"])
def two_ranks(setup: Setup) -> Finding:
    """Check that two processes are one job of two ranks, not two jobs of one."""
    outcome = setup.probe("ranks", 2)
    if outcome.answer and len(outcome.answer) == 1:
        return bad(
            "two processes started, but each one is alone",
            f"{find_mpiexec()} does not belong to the library that mpi4py loads: take both from "
            "the same MPI installation, and remove other MPIs from LD_LIBRARY_PATH",
        )
    if outcome.failure:
        code = ["-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
        set_before = [f"{name}={shlex.quote(text)}" for name, text in launch_settings().items()]
        by_hand = " ".join([*set_before, shlex.join(mpiexec_command(2, code))])
        return bad(outcome.failure, "run this by hand to see the whole output", by_hand)
    return good("size 2")


@check("MPI", "thread level", needs=["two ranks"])
def thread_level(setup: Setup) -> Finding:
    """Check that MPI can exchange gradients in the background: MPI_THREAD_MULTIPLE."""
    level = setup.probe("ranks", 2).answer[0]["thread level"]
    if level != "MULTIPLE":
        found = f"MPI_THREAD_{level}: double_buffering cannot exchange in the background"
        if told := [name for name in _THREAD_LEVELS if name in os.environ]:
            return bad(found, "let mpi4py ask MPI for MULTIPLE", f"unset {' '.join(told)}")
        return bad(found, "use an MPI that was built with MPI_THREAD_MULTIPLE")
    return good(f"MPI_THREAD_{level}")


@check(
    "MPI",
    "shared memory",
    needs=["two ranks", "chainermn imports"],
    blames=["/dev/shm", "chainer-compat"],
)
def shared_memory(setup: Setup) -> Finding:
    """Check that all the ranks you want to start here can share memory."""
    ranks = max(2, setup.ranks or 2)
    outcome = setup.probe("shared_memory", ranks)
    if why := outcome.failure or outcome.answer:
        return bad(
            f"{ranks} ranks cannot share memory: {why}",
            "start all containers on this host with docker run --network=host, and with "
            "--shm-size=1g, which MPI itself needs",
        )
    return good(f"{ranks} ranks share memory")


@check("MPI", "all-reduce", needs=["two ranks", "chainermn imports"], blames=["/dev/shm"])
def all_reduce(setup: Setup) -> Finding:
    """Check that every communicator that runs on CPU computes exact means."""
    return judge_means(setup.probe("communicators", 2))


def judge_means(outcome: Outcome) -> Finding:
    """Turn the outcome of the probe ``communicators`` into a finding."""
    if outcome.failure:
        return bad(outcome.failure, "please report this with the output of this command")
    right = ", ".join(name for name, wrong in outcome.answer.items() if not wrong)
    if wrong := [f"{name}: {wrong}" for name, wrong in outcome.answer.items() if wrong]:
        return bad(
            "; ".join(wrong),
            f"use a communicator that is exact ({right or 'none of them'}), and please report "
            "this with the output of this command",
        )
    return good(f"exact: {right}")
