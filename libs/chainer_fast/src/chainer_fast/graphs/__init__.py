"""Training steps as CUDA graphs: recorded once, then launched as a whole.

``optimizer.use_cuda_graphs()``, or ``CHAINER_CUDA_GRAPHS=1`` for all optimizers, switches them on.
"""
