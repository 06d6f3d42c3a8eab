"""A replacement for iDeep's Python module, based on oneDNN.

Chainer imports a module ``ideep4py`` and lets it compute if ``chainer.config.use_ideep`` says so.
Its last release does not install on any current Python. Where it is missing, ``import ideep4py``
gives the names of this package, with the signatures that Chainer uses.
"""

from chainer_fast.ideep4py import batch_normalization as batchNormalization
from chainer_fast.ideep4py import concatenation as concat
from chainer_fast.ideep4py import convolution as convolution2D
from chainer_fast.ideep4py import dropout, linear, relu
from chainer_fast.ideep4py import local_response_normalization as localResponseNormalization
from chainer_fast.ideep4py import pooling as pooling2D
from chainer_fast.ideep4py.arrays import (
    array,
    basic_copyto,
    check_ndim,
    check_type,
    dat_array,
    get_array_module,
    mdarray,
    multi_add,
    wgt_array,
)
from chainer_fast.ideep4py.concatenation import intVector, mdarrayVector
from chainer_fast.ideep4py.convolution import convolution2DParam
from chainer_fast.ideep4py.local_response_normalization import localResponseNormalizationParam
from chainer_fast.ideep4py.pooling import pooling2DParam
from chainer_fast.onednn import library

__all__ = [
    "array",
    "basic_copyto",
    "batchNormalization",
    "check_ndim",
    "check_type",
    "concat",
    "convolution2D",
    "convolution2DParam",
    "dat_array",
    "dropout",
    "get_array_module",
    "intVector",
    "linear",
    "localResponseNormalization",
    "localResponseNormalizationParam",
    "mdarray",
    "mdarrayVector",
    "multi_add",
    "pooling2D",
    "pooling2DParam",
    "relu",
    "wgt_array",
]

#: Chainer requires iDeep 2.
__version__ = f"2.0.0+onednn.{library.version()}"
