"""A rank of a team: ``python -m benchmarks.ranks FOLDER PROGRAM``; see `benchmarks.harness`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.ranks.orders import Orders


def main() -> None:
    folder, program = sys.argv[1:]
    os.chdir(folder)
    try:
        importlib.import_module(f"benchmarks.ranks.{program}").run(Orders(Path(folder)))
    except Exception:
        # MPI would wait for the other ranks, which wait for this one.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
