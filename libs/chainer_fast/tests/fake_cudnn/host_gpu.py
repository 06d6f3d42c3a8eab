"""A stand-in for a GPU with CuPy: NumPy arrays, which are aligned as cuDNN needs them."""

from types import SimpleNamespace

import numpy as np

from chainer_fast.channels_last import layout
from chainer_fast.cudnn import runner


class HostGpu(runner.Gpu):
    def __init__(self):
        self.synchronized = 0
        self.number = 0
        self.current_stream = 7
        self.of_capability = 90
        self.copied = []

    def device(self):
        return self.number

    def capability(self):
        return self.of_capability

    def stream(self):
        return self.current_stream

    def synchronize(self):
        self.synchronized += 1

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view("u1")[...] = 0xFF  # NaN in every float dtype
        return array

    def allocate(self, size):
        array = np.empty(size, "u1")
        return SimpleNamespace(ptr=self.pointer(array), array=array)

    def copy(self, array):
        self.copied.append(array.shape)
        return np.array(array, order="C")

    def pointer(self, array):
        return array.ctypes.data

    def padded(self, images, n_channels):
        found = layout.empty(np, (images.shape[0], n_channels, *images.shape[2:]), images.dtype)
        found[...] = 0
        found[:, : images.shape[1]] = images
        return found

    def add_bias(self, images, bias):
        flat = layout.as_stored(images)
        assert flat.flags.c_contiguous
        flat += bias
