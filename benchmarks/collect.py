"""Copy the results of ``ci/prove_on_gpu.py`` into docs/results, and write the page about them."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, gpu, quotes, report
from ci.gpu_proof import verdicts


def collect(folders: Sequence[Path]) -> None:
    """Copy the results of several runs, the latest last, into docs/results."""
    if empty := [str(folder) for folder in folders if not (folder / "verdicts.json").exists()]:
        sys.exit(
            f"no verdicts.json in {', '.join(empty)}: name folders that earlier runs got as --out"
        )
    runs = [verdicts.load(folder / "verdicts.json") for folder in folders]
    gpus = {line for about, _ in runs for line in about["machine"] if line.startswith("GPU:")}
    if len(gpus) > 1:
        sys.exit(
            f"the page is about one kind of GPU, and these runs had {'; '.join(sorted(gpus))}"
        )
    raw = figures.RESULTS / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for mpi in report.MPIS:
        if with_it := [run for run in runs if mpi_of(run[0]) == mpi]:
            text = "\n".join(verdicts.page(with_it[-1][0], verdicts.merge(with_it)))
            (raw / gpu.VERDICTS.format(mpi=mpi)).write_text(text + "\n", encoding="utf-8")
    figures_of: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    for folder, (about, _) in zip(folders, runs, strict=True):
        for file in folder.glob("gpu-*.timeline.gz"):
            shutil.copy(file, raw)
        for file in folder.glob("gpu-*.json"):
            # The machine that measured them may have no git history.
            figures_of[file.name].append((json.loads(file.read_text("utf-8")), about["commit"]))
    for name, measured in figures_of.items():
        text = json.dumps(verdicts.merge_figures(measured), indent=1)
        (raw / name).write_text(text + "\n", encoding="utf-8")
    gpu.write("gpu")
    gpu.draw()
    quotes.write_all()
    print(f"written: {figures.RESULTS / 'gpu.md'}")


def mpi_of(about: dict[str, Any]) -> str:
    """Return the MPI that a run had installed."""
    return "openmpi" if any("; openmpi " in line for line in about["machine"]) else "mpich"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = "folder that an earlier run got as --out; the latest comes last"
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT", help=what)
    collect(parser.parse_args().folders)
