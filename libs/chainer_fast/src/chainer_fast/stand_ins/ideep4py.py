"""What ``import ideep4py`` gives if iDeep is missing, which Chainer asks at its own import."""

import sys

from chainer_fast.onednn import library

try:
    library.load()
except ImportError as error:
    if library.is_installed():
        # Not a warning, because Chainer must import even if warnings are errors.
        sys.stderr.write(f"chainer_fast: {error}. Chainer computes without oneDNN\n")
    raise
else:
    from chainer_fast.ideep4py import *  # noqa: F403
    from chainer_fast.ideep4py import __version__ as __version__
