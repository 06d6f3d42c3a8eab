"""The command ``chainermn``, outside of the package ``chainermn``.

Where chainer-compat is not at work, that name means the package inside Chainer's wheel. The
doctor must start there too, to say so.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command line of the ``chainermn`` that was installed together with this file."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_chainermn_dist", here.parent / "src"):  # a wheel, an editable install
        if (folder / "chainermn").exists():
            sys.path.insert(0, str(folder))
            break
    from chainermn.__main__ import main

    main(prog_name="chainermn")
