"""Convolution and batch normalization by cuDNN 9, because CuPy 14 no longer supports cuDNN.

Optional, and off unless ``CHAINER_COMPAT_CUDNN=1`` asks for it. ``graphs`` describes computations
and only knows shapes; ``runner`` runs them on a GPU with NVIDIA's nvidia-cudnn-frontend;
``normalization`` calls the functions of cuDNN that the frontend does not have;
``repairs/cudnn.py`` decides which of Chainer's calls use cuDNN. Pooling is left to Chainer.
"""
