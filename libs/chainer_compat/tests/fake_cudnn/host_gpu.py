"""What stands in for a GPU with CuPy: arrays of NumPy's, which begin where cuDNN's have to."""

import numpy as np

from chainer_compat.cudnn import runner


class HostGpu(runner.Gpu):
    def __init__(self):
        self.synchronized = 0
        self.number = 0
        self.of_capability = 90

    def device(self):
        return self.number

    def capability(self):
        return self.of_capability

    def stream(self):
        return 7

    def synchronize(self):
        self.synchronized += 1

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view("u1")[...] = 0xFF  # floats that are no numbers
        return array

    def copy(self, array):
        return np.array(array, order="C")

    def pointer(self, array):
        return array.ctypes.data
