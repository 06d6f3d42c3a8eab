"""One rank of a team of `benchmarks.harness`: ``python -m benchmarks.ranks FOLDER PROGRAM``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.ranks.orders import Orders

# Packages in Chainer's wheel.
_WHEEL = ("chainer", "chainermn")


def main() -> None:
    folder, program = sys.argv[1:]
    os.chdir(folder)
    try:
        module = importlib.import_module(f"benchmarks.ranks.{program}")
        check_original()
        module.run(Orders(Path(folder)))
    except Exception:
        # On exit, MPI would wait for the other ranks, which wait for this one.
        traceback.print_exc()
        os._exit(1)


def check_original() -> None:
    """Raise an error if this rank should use the original ``chainermn`` but imported another."""
    if "CHAINER_COMPAT_BUNDLED_CHAINERMN" in os.environ and "chainermn" in sys.modules:
        folders = [Path(str(sys.modules[name].__file__)).parents[1] for name in _WHEEL]
        if folders[0] != folders[1]:
            raise RuntimeError(
                f"expected the original chainermn, beside Chainer in {folders[0]}, "
                f"but it was imported from {folders[1]}: unset PYTHONPATH"
            )


if __name__ == "__main__":
    main()
