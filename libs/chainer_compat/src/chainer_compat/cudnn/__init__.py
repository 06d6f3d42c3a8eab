"""Convolution and batch normalization by cuDNN 9, for CuPy 14, which has no cuDNN of its own.

Optional, and off unless ``CHAINER_COMPAT_CUDNN=1`` asks for it. ``graphs`` says what cuDNN is to
compute and knows only shapes; ``runner`` has it computed on a GPU by NVIDIA's
nvidia-cudnn-frontend; ``normalization`` calls the functions of cuDNN that the frontend does not
have; ``repairs/cudnn.py`` decides which of Chainer's calls go there. Pooling is left to Chainer.
"""
