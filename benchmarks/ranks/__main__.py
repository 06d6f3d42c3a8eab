"""A rank of a team: ``python -m benchmarks.ranks FOLDER PROGRAM``; see `benchmarks.harness`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.ranks.orders import Orders

# What Chainer's wheel contains.
_WHEEL = ("chainer", "chainermn")


def main() -> None:
    folder, program = sys.argv[1:]
    os.chdir(folder)
    try:
        module = importlib.import_module(f"benchmarks.ranks.{program}")
        check_original()
        module.run(Orders(Path(folder)))
    except Exception:
        # MPI would wait for the other ranks, which wait for this one.
        traceback.print_exc()
        os._exit(1)


def check_original() -> None:
    """Raise if this rank is one of the original's, but has imported another ``chainermn``."""
    if "CHAINER_COMPAT_BUNDLED_CHAINERMN" in os.environ and "chainermn" in sys.modules:
        folders = [Path(str(sys.modules[name].__file__)).parents[1] for name in _WHEEL]
        if folders[0] != folders[1]:
            raise RuntimeError(
                f"chainermn was to be the original, which lies beside Chainer in {folders[0]}, "
                f"but it was imported from {folders[1]}; unset PYTHONPATH"
            )


if __name__ == "__main__":
    main()
