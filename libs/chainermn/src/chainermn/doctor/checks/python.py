"""Check Python, Chainer, and that ``import chainermn`` imports this library."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from pathlib import Path

from chainermn import remedies
from chainermn.doctor.registry import Finding, bad, check, good
from chainermn.doctor.setup import Setup
from chainermn.process.patience import run_patiently

_WITHOUT_ONEDNN = shlex.join([sys.executable, "-m", "pip", "uninstall", "onednn-cpu-gomp"])
_OURS = Path(__file__).resolve().parents[2]
# Finds chainermn without importing it, since an import may fail or do anything. The first search
# loads what searching needs, before the folder could replace it.
_FIND = (
    "import importlib.util, sys; find = importlib.util.find_spec; find('chainermn'); "
    "sys.path.insert(0, sys.argv[1]); print(find('chainermn').origin)"
)


@check("Python", "chainer-compat")
def chainer_compat(setup: Setup) -> Finding:
    """Check that chainer-compat, which makes Chainer run on today's Python, is active."""
    outcome = setup.probe("compat")
    if outcome.failure:
        return _broken(outcome.failure, "chainer-compat", remedies.reinstall("chainer-compat"))
    hook = outcome.answer["hook"]
    if "CHAINER_COMPAT_DISABLE" in hook:
        return bad(hook, "switch it back on", "unset CHAINER_COMPAT_DISABLE")
    if hook != "in place":
        return bad(hook, "reinstall it", remedies.reinstall("chainer-compat"))
    statuses = Counter(repair["status"] for repair in outcome.answer["repairs"])
    counts = ", ".join(f"{number} {status}" for status, number in statuses.items())
    return good(f"in place; repairs: {counts}")


@check("Python", "oneDNN", needs=["chainer-compat"])
def onednn(setup: Setup) -> Finding:
    """Check that oneDNN works, if it is installed."""
    found = setup.probe("compat").answer["onednn"]
    if "oneDNN is installed, but" in found:
        return bad(found, "install what it needs, or uninstall it", _WITHOUT_ONEDNN)
    return good(found)


@check("Python", "Chainer computes", needs=["chainer-compat"])
def chainer_computes(setup: Setup) -> Finding:
    """Check that a forward pass, a backward pass and a mean give the right numbers."""
    outcome = setup.probe("chainer_computes")
    if not outcome.failure and not outcome.answer:
        return good("a forward and a backward pass give the right numbers")
    found = outcome.failure or "wrong: " + ", ".join(outcome.answer)
    if os.environ.get("CHAINER_COMPAT_SKIP"):
        return bad(found, "switch all repairs back on", "unset CHAINER_COMPAT_SKIP")
    if outcome.failure:
        return _broken(found, "Chainer", remedies.install_chainer())
    report = shlex.join([sys.executable, "-m", "chainer_compat"])
    return bad(found, "please report this, with the output of", report)


@check("Python", "chainermn is this one", needs=["chainer-compat"])
def chainermn_is_this_one(setup: Setup) -> Finding:
    """Check that neither Chainer's old copy nor a folder hides this ``chainermn``."""
    beside = setup.script.parent if setup.script and setup.script.is_file() else Path()
    shown = run_patiently([sys.executable, "-P", "-c", _FIND, beside.absolute()], setup.limit)
    lines = (shown.stdout if shown.returncode == 0 else shown.stderr).strip().splitlines()
    found = Path(lines[-1] if lines else f"exit code {shown.returncode}")
    if found.resolve().parent == _OURS:
        return good(str(found))
    folder = found.parent.parent
    instead = f"import chainermn finds {found} instead of {_OURS}"
    if os.environ.get("CHAINER_COMPAT_BUNDLED_CHAINERMN"):
        remedy = "stop asking for Chainer's own copy"
        return bad(instead, remedy, "unset CHAINER_COMPAT_BUNDLED_CHAINERMN")
    if not found.is_file() or (folder / "chainer").is_dir():
        return bad(instead, "reinstall chainermn", remedies.reinstall("chainermn"))
    remedy = "rename that folder"
    if str(folder) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        remedy += f", or remove {folder} from PYTHONPATH"
    other_name = found.parent.with_name("another_name")
    return bad(instead, remedy, shlex.join(["mv", str(found.parent), str(other_name)]))


@check("Python", "chainermn imports", needs=["Chainer computes"])
def chainermn_imports(setup: Setup) -> Finding:
    """Check that every public name can be imported."""
    outcome = setup.probe("public_names")
    if outcome.failure:
        return _broken(outcome.failure, "chainermn", remedies.reinstall("chainermn"))
    return good(f"all {outcome.answer} public names")


def _broken(failure: str, name: str, install: str) -> Finding:
    """Report a package that cannot be imported, with the command that installs what it lacks."""
    if missing := remedies.install_module(failure):
        return bad(failure, "install the missing module", missing)
    return bad(
        failure,
        "if that file does not belong to an installed package, move it away; otherwise reinstall "
        f"its package, for example {name}",
        install,
    )
