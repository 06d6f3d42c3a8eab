"""The environment variables, read when Chainer is imported or later, never before."""

import os

# ``CHAINER_COMPAT_CUDNN=1``: let cuDNN compute what it can, by nvidia-cudnn-frontend.
CUDNN = "CHAINER_COMPAT_CUDNN"
# ``CHAINER_COMPAT_MNIST=FOLDER-OR-URL``: take the files of MNIST from there and nowhere else.
MNIST = "CHAINER_COMPAT_MNIST"


def disabled() -> bool:
    """``CHAINER_COMPAT_DISABLE=1``: behave as if this package were not installed."""
    return is_on("CHAINER_COMPAT_DISABLE")


def bundled_chainermn() -> bool:
    """``CHAINER_COMPAT_BUNDLED_CHAINERMN=1``: ``import chainermn`` gives Chainer's own copy."""
    return is_on("CHAINER_COMPAT_BUNDLED_CHAINERMN")


def skipped() -> frozenset[str]:
    """``CHAINER_COMPAT_SKIP=NAME,NAME``: leave out these repairs. For the tests."""
    names = os.environ.get("CHAINER_COMPAT_SKIP", "")
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def mnist() -> str:
    """``CHAINER_COMPAT_MNIST``; empty if MNIST comes from the mirrors."""
    return os.environ.get(MNIST, "")


def is_on(variable: str) -> bool:
    """Return whether a variable is set, to something else than 0."""
    return os.environ.get(variable, "") not in ("", "0")
