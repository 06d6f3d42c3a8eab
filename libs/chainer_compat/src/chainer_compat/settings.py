"""Environment variables, which are only read when Chainer is imported or later."""

import os

# ``CHAINER_COMPAT_MNIST=FOLDER-OR-URL``: get the files of MNIST only from there.
MNIST = "CHAINER_COMPAT_MNIST"
# ``CHAINER_COMPAT_TRUST_FILES=1``: read files as Chainer did, which can run code from them.
TRUST_FILES = "CHAINER_COMPAT_TRUST_FILES"


def disabled() -> bool:
    """``CHAINER_COMPAT_DISABLE=1``: behave as if this package were not installed."""
    return is_on("CHAINER_COMPAT_DISABLE")


def bundled_chainermn() -> bool:
    """``CHAINER_COMPAT_BUNDLED_CHAINERMN=1``: let ``import chainermn`` give Chainer's own copy."""
    return is_on("CHAINER_COMPAT_BUNDLED_CHAINERMN")


def skipped() -> frozenset[str]:
    """``CHAINER_COMPAT_SKIP=NAME,NAME``: leave out these repairs. For the tests."""
    names = os.environ.get("CHAINER_COMPAT_SKIP", "")
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def mnist() -> str:
    """``CHAINER_COMPAT_MNIST``; empty if MNIST comes from the mirrors."""
    return os.environ.get(MNIST, "")


def trusts_files() -> bool:
    """``CHAINER_COMPAT_TRUST_FILES=1``; off by default."""
    return is_on(TRUST_FILES)


def is_on(variable: str) -> bool:
    """Return whether a variable is set to something other than 0."""
    return os.environ.get(variable, "") not in ("", "0")
