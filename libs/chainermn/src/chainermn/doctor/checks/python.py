"""Python, Chainer, and whether ``import chainermn`` gives this library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import chainermn
from chainermn.doctor.registry import Finding, bad, check, good
from chainermn.doctor.setup import Setup

OLDEST_PYTHON = (3, 11)
#: Those of `chainermn.communicators.cores`, which cannot be imported without Chainer.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
_OURS = Path(chainermn.__file__ or "").resolve().parent


@check("Python", "Python")
def python(setup: Setup) -> Finding:
    """Check that Python is new enough."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return bad(version, f"make an environment with Python {needed} or newer")
    return good(f"{version}, {sys.executable}")


@check("Python", "chainer-compat")
def chainer_compat(setup: Setup) -> Finding:
    """Check that the package that makes Chainer run on this Python is at work."""
    install = f"pip install --force-reinstall --no-deps chainer-compat=={chainermn.__version__}"
    if setup.compat.failure:
        return bad(setup.compat.failure, install)
    report = setup.compat.answer
    if "CHAINER_COMPAT_DISABLE" in report["hook"]:
        return bad(report["hook"], "unset CHAINER_COMPAT_DISABLE")
    if report["hook"] != "in place":
        return bad(report["hook"], f"{install}; start Python without -S")
    if (version := report["versions"]["chainer-compat"]) != chainermn.__version__:
        return bad(f"{version} does not belong to chainermn {chainermn.__version__}", install)
    statuses = [repair["status"] for repair in report["repairs"]]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    return good(f"in place; repairs: {counts}")


@check("Python", "Chainer computes")
def chainer_computes(setup: Setup) -> Finding:
    """Check that a forward pass, a backward pass and a mean give the right numbers."""
    outcome = setup.probe("chainer_computes")
    if outcome.failure:
        return bad(
            outcome.failure,
            "python -m chainer_compat says which repairs are active; "
            "a new environment helps: pip install 'chainermn[mpich]'",
        )
    if outcome.answer:
        return bad(
            "wrong: " + ", ".join(outcome.answer),
            "repairs of chainer-compat are missing: unset CHAINER_COMPAT_SKIP, or report this",
        )
    return good("a forward and a backward pass are right")


@check("Python", "chainermn is this one")
def chainermn_is_this_one(setup: Setup) -> Finding:
    """Check that neither Chainer's old copy nor some folder takes the name ``chainermn``."""
    found = subprocess.run(
        [sys.executable, "-c", "import chainermn; print(chainermn.__file__)"],
        cwd=setup.script.parent if setup.script and setup.script.is_file() else None,
        capture_output=True,
        text=True,
        timeout=setup.limit,
    )
    lines = (found.stdout if found.returncode == 0 else found.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {found.returncode}"
    if found.returncode == 0 and Path(last).resolve().parent == _OURS:
        return good(last)
    if os.environ.get("CHAINER_COMPAT_BUNDLED_CHAINERMN"):
        remedy = "unset CHAINER_COMPAT_BUNDLED_CHAINERMN"
    else:
        remedy = (
            "if that is Chainer's own copy, mend chainer-compat (above); "
            "else move or rename it, or take its folder out of PYTHONPATH"
        )
    return bad(f"import chainermn gives {last} instead of {_OURS}", remedy)


@check("Python", "chainermn imports")
def chainermn_imports(setup: Setup) -> Finding:
    """Check that everything public can be imported."""
    outcome = setup.probe("public_names")
    if outcome.failure:
        install = "pip install --force-reinstall chainermn; what fails to import is named above"
        return bad(outcome.failure, install)
    return good(f"all {outcome.answer} public names")


@check("Python", "cores")
def cores(setup: Setup) -> Finding:
    """Check that there are cores for the ranks, and for the threads that each is told to start."""
    here, ranks = setup.cores, setup.ranks or 1
    if ranks > here:
        return bad(
            f"{here} cores for {ranks} ranks",
            f"start {here} ranks at most: more take turns, and wait for each other",
        )
    for name in THREAD_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit() and ranks * int(value) > here:
            return bad(
                f"{name}={value}: ranks: {ranks}, threads: {ranks * int(value)}, cores: {here}",
                f"unset {name}: create_communicator divides the cores among the ranks of a host",
            )
    return good(f"{here}, for {ranks} ranks" if setup.ranks else str(here))
