"""The report that ``python -m chainer_compat`` prints."""

import importlib.util
import platform
import sys
import warnings
from importlib import metadata
from typing import Any

from chainer_compat import hook, loading, registry, settings


def collect() -> dict[str, Any]:
    """Return versions, the location of chainermn, the state of oneDNN, and every repair."""
    cupy = metadata.packages_distributions().get("cupy", ["cupy"])
    ours = ("chainer", "chainermn", "chainer-compat", "chainer-fast")
    names = (*ours, "numpy", *cupy, "nvidia-cudnn-frontend", "protobuf", "setuptools")
    # Import Chainer first, because only then is it known whether CuPy works.
    chainer, hook_state, fast = _chainer(), _hook(), registry.accelerations()
    return {
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in names},
        "hook": hook_state,
        "chainer": chainer,
        "chainermn": _chainermn(),
        "onednn": fast.onednn() if fast else "not used: chainer-fast is not installed",
        "repairs": [_repair(repair, hook_state) for repair in registry.all_repairs()],
    }


def as_text(report: dict[str, Any]) -> str:
    """Format a report for a terminal."""
    facts = {
        **report["versions"],
        "hook": report["hook"],
        "import chainer": report["chainer"],
        "import chainermn": report["chainermn"],
        "oneDNN": report["onednn"],
    }
    repairs = [
        (repair["status"], repair["name"], repair["reason"]) for repair in report["repairs"]
    ]
    return f"{_table(list(facts.items()))}\n\n{_table(repairs)}"


def _table(rows: list[Any]) -> str:
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join(
        "  ".join(
            [*(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]
        )
        for row in rows
    )


def _repair(repair: registry.Repair, hook_state: str) -> dict[str, str]:
    status, reason = repair.status() if hook_state == "in place" else ("off", "see hook")
    return {"name": repair.name, "module": repair.module, "status": status, "reason": reason}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _hook() -> str:
    if settings.disabled():
        return "switched off by CHAINER_COMPAT_DISABLE"
    if not any(isinstance(finder, hook.Finder) for finder in sys.meta_path):
        return "not in place: no .pth file was processed; call chainer_compat.install()"
    return "in place"


def _chainer() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import chainer
    except Exception as error:
        return f"fails with {type(error).__name__}: {error}"
    return str(chainer.__file__)


def _chainermn() -> str:
    spec = importlib.util.find_spec("chainermn")
    if spec is None or spec.origin is None:
        return "not found"
    ours = loading.find_chainermn()
    is_ours = ours is not None and ours.origin == spec.origin
    return spec.origin if is_ours else f"{spec.origin} (Chainer's bundled copy)"
