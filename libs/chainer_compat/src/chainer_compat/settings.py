"""The environment variables, read when Chainer is imported and never before."""

import os


def disabled() -> bool:
    """``CHAINER_COMPAT_DISABLE=1``: behave as if this package were not installed."""
    return _is_on("CHAINER_COMPAT_DISABLE")


def bundled_chainermn() -> bool:
    """``CHAINER_COMPAT_BUNDLED_CHAINERMN=1``: ``import chainermn`` gives Chainer's own copy."""
    return _is_on("CHAINER_COMPAT_BUNDLED_CHAINERMN")


def skipped() -> frozenset[str]:
    """``CHAINER_COMPAT_SKIP=NAME,NAME``: leave out these repairs. For the tests."""
    names = os.environ.get("CHAINER_COMPAT_SKIP", "")
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")
