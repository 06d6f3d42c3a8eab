"""What need not be installed."""

from __future__ import annotations

import importlib.util


def why_no_torch() -> list[str]:
    """Return why there is no comparison with PyTorch; nothing if there is one."""
    if importlib.util.find_spec("torch") is None:
        return ["PyTorch: it is not installed; pip install torch"]
    return []
