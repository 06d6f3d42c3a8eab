"""How long a script takes to start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import Group, Measured
from benchmarks.harness import REPOSITORY, THE_ORIGINAL, Settings
from chainermn.launch.mpiexec import launch_environment, mpiexec_command

CHAINER = "import chainer"
MPI = "from mpi4py import MPI"
# chainermn imports its public names when they are used.
CHAINERMN = "import chainermn\nfor name in dir(chainermn): getattr(chainermn, name)"
COMMUNICATOR = "chainermn.create_communicator('naive')"
OURS, ORIGINAL = "import chainer, chainermn; create_communicator", "the original: the same"
ALONE = {
    "nothing": ("pass",),
    "import chainer": (CHAINER,),
    "import chainer, chainermn": (CHAINER, CHAINERMN),
}
ON_RANKS = {
    "MPI alone": (MPI,),
    "import chainer, and MPI": (CHAINER, MPI),
    OURS: (CHAINER, CHAINERMN, COMMUNICATOR),
    ORIGINAL: (CHAINER, "import chainermn", COMMUNICATOR),
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    yield measure_scripts("one process", ALONE, "import chainer", settings)
    yield measure_scripts("mpiexec -n 2", ON_RANKS, "import chainer, and MPI", settings)


def measure_scripts(
    title: str, scripts: Mapping[str, Sequence[str]], baseline: str, settings: Settings
) -> Group:
    """Measure scripts that only start."""
    runs = {
        name: (sys.executable, lines, THE_ORIGINAL if name == ORIGINAL else {})
        for name, lines in scripts.items()
    }
    if settings.before:
        for name in (name for name, lines in scripts.items() if CHAINERMN in lines):
            runs[f"before: {name}"] = (settings.before, scripts[name], {})
    rows = {name: Measured(name) for name in runs}
    for round_ in range(2 if settings.quick else 2 * settings.rounds + 1):
        for name, (python, lines, env) in runs.items():
            settings.tell(f"{title}: {name}")
            command = [python, "-W", "ignore", "-c", "\n".join(lines)]
            if scripts is ON_RANKS:
                command = mpiexec_command(2, command, python=False)
            env = {**os.environ, **launch_environment(), **env}
            start = time.perf_counter()
            subprocess.run(command, env=env, cwd=REPOSITORY, check=True, capture_output=True)
            if round_ > 0:  # the first round reads the files from the disk
                rows[name].seconds.append(time.perf_counter() - start)
    return Group(title, {"start": title}, list(rows.values()), baseline)
