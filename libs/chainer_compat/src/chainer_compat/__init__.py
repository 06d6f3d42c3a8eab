"""Chainer 7.8.1 on today's Python, NumPy and CuPy.

Active as soon as it is installed, without being imported. See :func:`install` for the places where
Python does not process ``.pth`` files.
"""

# This file runs at every start of the interpreter, so it must not import more than the hook.
from chainer_compat.hook import install

__all__ = ["__version__", "install"]
__version__ = "8.0.0"
