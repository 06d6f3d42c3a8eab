"""oneDNN through its C API: kernels of deep learning for the CPU. Knows nothing of Chainer."""
