"""The live view of apps/cifar, in the middle of a training.

``mpiexec -n 2 python -m drawings.screenshot``, in docs, trains and writes the picture.
"""

from __future__ import annotations

import io
import re
import runpy
import sys
import tempfile
from pathlib import Path

import chainer
from rich.console import Console

import chainermn.extensions
from chainermn.extensions import TerminalReport

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/_static/live_view.svg"
ITERATION = 520  # in the sixth epoch
COLUMNS, LINES = 110, 24


class Screenshot(TerminalReport):
    """Writes what a terminal shows after some iterations."""

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        if trainer.updater.iteration == ITERATION:
            console = Console(record=True, file=io.StringIO(), width=COLUMNS, highlight=False)
            console.print(self.view(trainer, COLUMNS, LINES))
            svg = console.export_svg(title="mpiexec -n 2 apps/cifar/train.py", unique_id="live")
            # Browsers load no fonts for a picture.
            PICTURE.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    chainermn.extensions.TerminalReport = Screenshot
    script = ROOT / "apps/cifar/train.py"
    with tempfile.TemporaryDirectory() as out:
        sys.argv = [str(script), "--out", out]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
