"""Run checks of repairs.

``python -W error run_checks.py FILE NAME...`` runs the named checks of a file ``checks.py`` and
prints, as JSON, how each one failed, or null. With ``--without`` after the file, each check runs
without its repair, in a process that has not imported Chainer before.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

IMPORTED_ONCE = (
    "chainer_compat.registry",
    "PIL.Image",
    "filelock",
    "google.protobuf.message",
    "h5py",
    "multiprocessing.sharedctypes",
    "numpy.typing",
    "onnx.reference",
    "pytest",
    "scipy.sparse",
    "scipy.special",
    "six.moves.urllib",
    "unittest",
)


def failure(name):
    """Return a failing check's traceback, or None."""
    try:
        importlib.import_module(CHECKS).CHECKS[name]()
    except BaseException:
        return traceback.format_exc()
    return None


def failure_without_repair(name):
    """Return how a check fails in a process that imports Chainer without the check's repair."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["CHAINER_COMPAT_SKIP"] = name
        with open(writer, "w") as file:
            json.dump(failure(name), file)
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        found = json.load(file)
    os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    # Python's warning against forking with threads, which MultiprocessIterator does.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    file, *names = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    CHECKS, try_out = Path(file).stem, failure
    if names[0] == "--without":
        try_out, names = failure_without_repair, names[1:]
        # What Chainer and the checks import needs to be imported only once.
        for module in IMPORTED_ONCE:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    print(json.dumps({name: try_out(name) for name in names}))
