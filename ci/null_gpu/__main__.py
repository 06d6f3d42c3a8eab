"""Run a program as if this machine had GPUs: the null GPU.

``python ci/null_gpu mpiexec -n 2 python apps/mnist/train.py --gpu`` runs Chainer and CuPy as they
are, on top of a CUDA that does nothing: device memory is host memory, copies copy, and kernels are
compiled but not run. Everything computed stays zero. This shows

* that a program runs to its end on GPUs: devices, streams, memory, kernels that compile, Python;
* where the host waits for a GPU, and which line of Python is to blame;
* whether work can be captured as a CUDA graph, and what a launch of the graph still needs.

It shows nothing about numbers, speed, races, or what else CUDA itself checks.
It needs Linux on x86-64, a C compiler, CuPy for CUDA 13, and NVRTC and CUDA's headers from wheels:
the group null-gpu of pyproject.toml.

How it works: CuPy's modules contain CUDA's runtime. As soon as Python has loaded one, its
runtime functions are overwritten with jumps to those in null_gpu.c and capture.c. The driver,
cuBLAS, cuRAND and NCCL are libraries that are loaded by name, so ours are loaded first. NVRTC is
the real one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:  # started as `python ci/null_gpu`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from ci.null_gpu import build, waits

CANNOT = 3


def main() -> int:
    """Run the command; return its exit code."""
    args = parse_arguments()
    if reason := build.why_not():
        print(f"null_gpu: {reason}", file=sys.stderr)
        return CANNOT
    with tempfile.TemporaryDirectory(prefix="null-gpu-") as folder:
        notes = Path(folder)
        command = [args.program, *args.arguments]
        code = subprocess.call(command, env=build.environment(args.devices, notes))
        print(waits.read(notes).table(), file=sys.stderr)
    return code if code >= 0 else 128 - code


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="null_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=2, help="GPUs of this host")
    parser.add_argument("program", metavar="PROGRAM")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
