"""Chainer 7.8.1 as fast as the machine: oneDNN, cuDNN, fewer copies and fewer kernel launches.

Active as soon as it is installed, without being imported: ``chainer_compat`` applies the table in
:mod:`chainer_fast.registry`.
"""

__version__ = "8.0.0"
