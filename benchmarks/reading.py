"""The reading of images: what `input_pipeline`, a script of its own, has measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import REPOSITORY, Measured
from benchmarks.peers import why_no_torch
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "The input pipeline of apps/imagenet"
INTRODUCTION = """\
Milliseconds for a batch of 32 images, ready for the network, from JPEG files of 500x375 pixels
that are decoded and cut out at random, beside PyTorch's DataLoader on the same files with the same
function; see `benchmarks/input_pipeline.py`. The reference is what decoding and cutting take in
one process, divided by the workers."""

BATCHSIZE = 32


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    tell = settings.teller("input pipeline")
    tell("chainer, PyTorch")
    files, rounds = ("96", "1") if settings.quick else ("640", str(settings.rounds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        script = REPOSITORY / "benchmarks/input_pipeline.py"
        options = ["--files", files, "--rounds", rounds, "--json", str(path)]
        subprocess.run([sys.executable, script, *options], check=True, capture_output=True)
        found = json.loads(path.read_text())
    (alone,) = found.pop("0").values()
    groups = []
    for workers, rates in found.items():
        rows = [
            Measured(NAMES[name], [BATCHSIZE / rate for rate in rates[name]]) for name in rates
        ]
        title = f"{workers} worker{'s' * (workers != '1')}"
        group = Group(title, {"workers": workers}, rows, NAMES["torch"])
        group.reference = BATCHSIZE / sorted(alone)[len(alone) // 2] / int(workers)
        group.reference_is = "decoding and cutting alone"
        groups.append(group)
    return groups, why_no_torch()


NAMES = {"chainer": "ours", "torch": "PyTorch DataLoader"}
