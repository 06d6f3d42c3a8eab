"""Compression of gradients: ranks send fewer bytes, and send the error later.

Each algorithm is one file. Its class holds the settings and compresses the gradients of one
bucket; `chainermn.gradients.compressor` keeps the errors from one step to the next.
"""

from chainermn.compression.compression import Compression
from chainermn.compression.power_sgd import PowerSGD
from chainermn.compression.quantization import Quantization
from chainermn.compression.top_k import TopK

__all__ = ["Compression", "PowerSGD", "Quantization", "TopK"]
