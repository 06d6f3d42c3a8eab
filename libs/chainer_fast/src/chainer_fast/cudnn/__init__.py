"""Convolution and batch normalization by cuDNN 9, because CuPy 14 no longer supports cuDNN.

Optional, and off unless ``CHAINER_COMPAT_CUDNN=1`` asks for it. ``graphs`` describes convolutions
and only knows shapes; ``runner`` runs them on a GPU with NVIDIA's nvidia-cudnn-frontend;
``padding`` adds channels to images that have few. ``normalization`` calls the functions of cuDNN
that the frontend does not have, and ``fused_normalization`` those for channels-last images.
``repairs/cudnn.py`` decides which of Chainer's calls use cuDNN. It never computes pooling.
"""
