"""All checks, grouped by subject."""

from __future__ import annotations

from chainermn.doctor.checks import gpu, hosts, job, mpi, python
from chainermn.doctor.registry import Check

#: All checks, in the order in which they run and appear, which is their order in the files.
CHECKS: tuple[Check, ...] = tuple(
    found
    for module in (python, mpi, gpu, job, hosts)
    for found in vars(module).values()
    if isinstance(found, Check)
)
