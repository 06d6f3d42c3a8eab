"""Use oneDNN's deep-learning kernels for CPUs through its C API. Does not depend on Chainer."""
