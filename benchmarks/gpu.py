"""On GPUs: gathering and scattering gradients, exchanging them, whole iterations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.harness import REPOSITORY, Measured
from benchmarks.report import Group
from benchmarks.settings import Settings
from chainermn.launch.mpiexec import launch_environment, mpiexec_command

TITLE = "On GPUs"
INTRODUCTION = """\
One rank on each GPU of one machine. Times are those of the GPU, by CUDA events, on the slowest
rank; every round all have one turn of ten steps. Medians of the turns, and medians of the ratios
inside a round. `raw NCCL all-reduce` is that of as many bytes as the gradients have, in one
buffer. PyTorch computes in float32, without TF32, as CuPy does. Convolutions go by im2col where
cuDNN is not named."""

_SECONDS = 400.0


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    from chainermn.transport.gpu.available import why_no_gpu, why_no_nccl
    from chainermn.transport.gpu.device import the_gpu

    reason = why_no_gpu() or why_no_nccl()
    if reason is not None:
        return [], [f"anything on a GPU: {reason}"]
    ranks = len(the_gpu().devices())
    settings.teller(TITLE)(f"{ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = mpiexec_command(
            ranks, ["-m", "benchmarks.ranks.on_gpu", str(file), str(settings.rounds)]
        )
        environment = {**launch_environment(), "PYTHONPATH": python_path()}
        if importlib.util.find_spec("cudnn") is not None:
            environment["CHAINER_COMPAT_CUDNN"] = "1"
        try:
            job = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            return [], [f"anything on a GPU: not done within {_SECONDS:g} s"]
        if not file.exists():
            lines = job.stderr.strip().splitlines() or [f"exit code {job.returncode}"]
            return [], [f"anything on a GPU: {lines[-1]}"]
        measured = json.loads(file.read_text())
    groups = [
        Group(**{**group, "rows": [Measured(**row) for row in group["rows"]]})
        for group in measured
    ]
    return [group for group in groups if settings.wants(group.title)], []


def python_path() -> str:
    """Return the path by which a rank finds this package."""
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def write() -> None:
    """Write ``docs/results/gpu.md``: what was measured, and what `ci/prove_on_gpu.py` tried."""
    saved = report.load("gpu")
    page = report.RESULTS / "gpu.md"
    if any(content["groups"] for content in saved.values()):
        report.write("gpu", TITLE, INTRODUCTION)
    else:
        lines = [f"# {TITLE}", ""]
        for content in saved.values():
            lines += [f"- Not measured: {reason}" for reason in content["skipped"]]
        page.write_text("\n".join(lines) + "\n")
    tried = report.RESULTS / "raw/tried-on-gpu.md"
    if tried.exists():
        page.write_text(f"{page.read_text()}\n{tried.read_text()}")
