"""What you mean to start on this host: ranks and their threads, a script, its data."""

from __future__ import annotations

import os
import re
from pathlib import Path

from chainermn.doctor import host_facts
from chainermn.doctor.registry import Finding, bad, check, good, not_tried
from chainermn.doctor.setup import Setup

#: Those of `chainermn.process.cores`, which cannot be imported without Chainer.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)


@check("job", "cores")
def cores(setup: Setup) -> Finding:
    """Check that each rank has a core."""
    here, ranks = setup.cores, setup.ranks or 1
    if ranks > here:
        return bad(
            f"{here} cores for {ranks} ranks",
            f"start at most {here} ranks: more take turns, and wait for each other",
        )
    return good(f"{here}, for {ranks} ranks" if setup.ranks else str(here))


@check("job", "threads")
def threads(setup: Setup) -> Finding:
    """Check what each rank is told about threads."""
    ranks, wrong = setup.ranks or 1, {}
    told = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    for name, value in told.items():
        number = _number_of_threads(name, value)
        if number is None:
            wrong[name] = f"{name}={value!r}: expected a number of threads, at least 1"
        elif number > max(1, setup.cores // ranks):
            wrong[name] = (
                f"{name}={value}: {ranks * number} threads in all, for {setup.cores} cores"
            )
    if wrong:
        return bad(
            "; ".join(wrong.values()),
            "let create_communicator divide the cores among the ranks of a host",
            f"unset {' '.join(wrong)}",
        )
    shown = ", ".join(f"{name}={value}" for name, value in told.items())
    return good(shown or "create_communicator divides the cores among the ranks of a host")


@check("job", "script")
def script(setup: Setup) -> Finding:
    """Check that the script is here; with hosts, `same script` looks on each of them."""
    return _find_here(setup, "script", setup.script, must_be_file=True)


@check("job", "data")
def data(setup: Setup) -> Finding:
    """Check that the data are here; with hosts, `same data` looks on each of them."""
    return _find_here(setup, "data", setup.data)


def _find_here(
    setup: Setup, name: str, path: Path | None, *, must_be_file: bool = False
) -> Finding:
    if path is None:
        return not_tried(f"no {name} named: use --{name}")
    if setup.hosts:
        return not_tried(f"same {name} looks for it on every host")
    remedy = f"copy it there, or name its path by --{name}"
    if not path.exists():
        return bad(f"there is no {path.absolute()}", remedy)
    contents = host_facts.contents(str(path))
    if contents is None or (must_be_file and host_facts.digest(str(path)) is None):
        return bad(f"{path.absolute()} cannot be read, or is a folder", remedy)
    return good(f"{path}: {contents}")


def _number_of_threads(name: str, value: str) -> int | None:
    """Return the number that a variable sets, or None if it is nonsense."""
    levels = value.split(",")  # of nested parallel regions, which OpenMP alone has
    if len(levels) > 1 and name != "OMP_NUM_THREADS":
        return None
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]*\s*", level) for level in levels):
        return None
    return int(levels[0])
