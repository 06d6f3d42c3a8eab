"""How long it takes until a script can begin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.harness import REPOSITORY, THE_ORIGINAL, Measured
from benchmarks.report import Group
from benchmarks.settings import Settings
from chainermn.launch.mpiexec import launch_environment, mpiexec_command

TITLE = "Start-up"
INTRODUCTION = """\
The wall time of whole processes that only start, measured in turn: what `chainermn` adds to
`import chainer`, and `create_communicator` to the start of MPI itself. Every public name of
`chainermn` is used, as it imports them when they are used."""

CHAINER = "import chainer"
MPI = "from mpi4py import MPI"
NAMES = "import chainermn\nfor name in dir(chainermn): getattr(chainermn, name)"
COMMUNICATOR = "chainermn.create_communicator('naive')"


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    one = {
        "nothing": ("pass",),
        "import chainer": (CHAINER,),
        "import chainer, chainermn": (CHAINER, NAMES),
    }
    two = {
        "MPI alone": (MPI,),
        "import chainer, and MPI": (CHAINER, MPI),
        "import chainer, chainermn; create_communicator": (CHAINER, NAMES, COMMUNICATOR),
    }
    original = {
        "the original: the same": (CHAINER, "import chainermn", COMMUNICATOR),
    }
    return [
        measure_scripts("one process", [sys.executable], one, {}, "import chainer", settings),
        measure_scripts("mpiexec -n 2", None, two, original, "import chainer, and MPI", settings),
    ], []


def measure_scripts(
    title: str,
    python: Sequence[str] | None,
    scripts: Mapping[str, Sequence[str]],
    originals: Mapping[str, Sequence[str]],
    reference: str,
    settings: Settings,
) -> Group:
    """Measure scripts that do nothing but start; with ``mpiexec`` unless ``python`` is given."""
    tell = settings.teller(title)
    rows = {name: Measured(name) for name in (*scripts, *originals)}
    for round_ in range(2 if settings.quick else 2 * settings.rounds + 1):
        for name, lines in (*scripts.items(), *originals.items()):
            tell(name)
            arguments = ["-W", "ignore", "-c", "\n".join(lines)]
            command = [*python, *arguments] if python else mpiexec_command(2, arguments)
            env = {**launch_environment(), **(THE_ORIGINAL if name in originals else {})}
            start = time.perf_counter()
            subprocess.run(
                command, env={**os.environ, **env}, cwd=REPOSITORY, check=True, capture_output=True
            )
            if round_ > 0:  # the first one reads the files from the disk
                rows[name].seconds.append(time.perf_counter() - start)
    return Group(title, {"start": title}, list(rows.values()), reference)
