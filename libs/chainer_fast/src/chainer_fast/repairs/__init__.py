"""The functions that change Chainer's modules; ``chainer_fast.registry`` lists them."""
