"""A missing or broken oneDNN; threads, processes, and what is kept."""

import gc
import multiprocessing
import os
import platform
import shutil
import sys
import threading
from importlib import metadata
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_fast.onednn import layouts, library, openmp, operations, primitives
from chainer_fast.onednn.operations import Window

needs_onednn = pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())
W = np.random.default_rng(0).normal(size=(16, 16, 3, 3)).astype("f")
# A script that prints what it finds out about oneDNN, under Chainer's names.
ASK = """
import chainer, numpy as np
from chainer.backends import intel64
print(chainer.config.use_ideep, intel64.is_ideep_available())
x, w = np.ones((1, 3, 4, 4), 'f'), np.ones((16, 3, 1, 1), 'f')
print(type(chainer.functions.convolution_2d(x, w).array).__name__)
"""
WHY = "\ntry: intel64.check_ideep_available()\nexcept RuntimeError as error: print(error)"


def convolved(x):
    with chainer.using_config("use_ideep", "auto"):
        return np.asarray(F.convolution_2d(x, W, pad=1).array)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=(2, 16, 8, 8)).astype("f")


def test_it_is_installed_wherever_there_is_a_wheel_of_it():
    has_wheel = (sys.platform, platform.machine()) == ("linux", "x86_64")
    assert library.is_installed() == has_wheel


@needs_onednn
def test_it_computes_unless_told_otherwise(python):
    assert python(ASK).split() == ["auto", "True", "mdarray"]
    for mode, used in (("never", "ndarray"), ("auto", "mdarray"), ("always", "mdarray")):
        assert python(ASK, CHAINER_USE_IDEEP=mode).split() == [mode, "True", used]


@needs_onednn
def test_a_real_ideep4py_goes_first(python, tmp_path):
    (tmp_path / "ideep4py.py").write_text("class mdarray: pass\n__version__ = 'the real one'\n")
    code = "from chainer.backends import intel64; print(intel64.ideep.__version__)"
    assert python(code, PYTHONPATH=str(tmp_path)) == "the real one"


def broken(place):
    """Return code to run before importing Chainer; it makes oneDNN unavailable."""
    lines = {
        "not installed": "from chainer_fast.onednn import library\n"
        "library.DISTRIBUTION = 'no-such-distribution'",
        "no OpenMP": "from chainer_fast.onednn import openmp\n"
        "openmp.DISTRIBUTION = 'no-such-distribution'",
        "no file": "from chainer_fast.onednn import openmp\nopenmp.FILE = 'nothing.so'",
        "unreadable": "import ctypes\nload = ctypes.CDLL\n"
        "def refuse(name, *rest):\n"
        "    if 'dnnl' in str(name): raise OSError('wrong ELF class')\n"
        "    return load(name, *rest)\n"
        "ctypes.CDLL = refuse",
        "ARM": "import platform\nplatform.machine = lambda: 'aarch64'",
    }
    return lines[place] + "\n"


@needs_onednn
@pytest.mark.parametrize(
    "place, reason, is_said",
    [
        ("not installed", "pip install no-such-distribution", False),
        ("no OpenMP", "pip install --force-reinstall no-such-distribution", True),
        ("no file", "pip install --force-reinstall cmeel-libomp", True),
        ("unreadable", "wrong ELF class", True),
        ("ARM", "x86-64 processors; this is linux on aarch64", True),
    ],
)
def test_where_it_is_not_numpy_computes_and_the_reason_is_told(place, reason, is_said, execute):
    result = execute(sys.executable, "-c", broken(place) + ASK + WHY)
    assert result.returncode == 0, result.stderr
    first, second, *why = result.stdout.splitlines()
    assert (first, second) == ("never False", "ndarray")
    assert reason in why[-1]
    said = result.stderr.count("Chainer computes without oneDNN")
    assert said == is_said and (reason in result.stderr) == is_said


def test_onednn_is_not_looked_for_before_chainer_is_imported(python):
    code = "import sys; print([m for m in sys.modules if 'onednn' in m or m == 'ctypes'])"
    assert python(code) == "[]"


@needs_onednn
def test_what_is_invalid_is_refused_with_the_name_of_the_function():
    window = Window((1, 1), (1, 1), (0, 0), (0, 0))
    with pytest.raises(library.OneDNNError, match=r"convolution_forward.*invalid arguments"):
        operations.convolution((1, 3, 4, 4), (2, 4, 3, 3), (1, 2, 2, 2), False, window)


@needs_onednn
def test_equal_layouts_are_one_object():
    first = layouts.plain((2, 3))
    layouts.plain.cache_clear()
    assert layouts.plain((2, 3)) is first


@needs_onednn
def test_primitives_are_made_once_and_the_last_ones_kept(x, monkeypatch):
    made = []
    init = primitives.Primitive.__init__

    def counted(self, *arguments):
        made.append(self)
        init(self, *arguments)

    monkeypatch.setattr(primitives.Primitive, "__init__", counted)
    x = x[:, :, :7]  # a shape that no other test uses
    convolved(x)
    count = len(made)
    assert count > 0
    convolved(x + 1)
    assert len(made) == count

    made.clear()
    for n in range(1, primitives.KEPT + 100):
        operations.relu(layouts.plain((n,)), 0.0625)  # a slope that no other test uses
    living = weak_count(made)
    assert living() == primitives.KEPT


def weak_count(objects):
    """Let go of objects; return a function that counts those still in use elsewhere."""
    import weakref

    references = [weakref.ref(each) for each in objects]
    objects.clear()
    gc.collect()
    return lambda: sum(reference() is not None for reference in references)


@needs_onednn
def test_threads_compute_side_by_side(x):
    expected = convolved(x)
    found, errors = [], []

    def compute():
        try:
            for _ in range(20):
                found.append(convolved(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(found) == 80
    for each in found:
        np.testing.assert_array_equal(each, expected)


@pytest.fixture
def threads():
    """Give back the number of threads that compute, which a test may change."""
    before = openmp.max_threads()
    yield
    openmp.set_threads(before)


@needs_onednn
@pytest.mark.parametrize("number", [1, 2, 3])
def test_openmp_says_how_many_threads_compute(number, x, threads):
    openmp.set_threads(number)
    assert primitives.here()[1] == number
    with chainer.using_config("use_ideep", "never"):
        expected = F.convolution_2d(x, W, pad=1).array
    np.testing.assert_allclose(convolved(x), expected, rtol=1e-4, atol=1e-4)


THREADS = """
import os
import numpy
from chainer_fast.onednn import openmp
from chainer_fast.onednn.matrices import product

def n_threads():
    return len(os.listdir("/proc/self/task"))

a = numpy.ones((512, 512), "f")
before = n_threads()
{code}product(a, a)
print(n_threads() - before, openmp.max_threads())
"""


@needs_onednn
@pytest.mark.parametrize(
    "code, environment, expected",
    [
        ("", "3", "2 3"),
        ("", "1", "0 1"),
        ("openmp.set_threads(2); ", "4", "1 2"),
        ("import threadpoolctl; threadpoolctl.threadpool_limits(2, 'openmp'); ", "4", "1 2"),
    ],
)
def test_so_many_threads_are_started(code, environment, expected, python):
    load = "from chainer_fast.onednn import library; library.load(); "
    script = THREADS.format(code=load + code)
    # BLAS has no threads that may start or end meanwhile.
    found = python(script, OMP_NUM_THREADS=environment, OPENBLAS_NUM_THREADS="1")
    assert found == expected


IN_TWO_PROCESSES = """
import os
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    print(openmp.max_threads())
else:
    print(openmp.max_threads(), end=" ")
"""


@needs_onednn
@pytest.mark.parametrize("nonsense", ["", "abc", "99999999999"])
def test_a_number_of_threads_that_is_none_starts_as_many_as_cores(nonsense, python):
    load = "from chainer_fast.onednn import library, openmp; library.load()\n"
    found = python(load + IN_TWO_PROCESSES, OMP_NUM_THREADS=nonsense)
    assert found == f"1 {len(os.sched_getaffinity(0))}"


def _in_a_child(x, expected, results):
    np.testing.assert_array_equal(convolved(x), expected)
    results.put((os.getpid(), openmp.max_threads()))


@needs_onednn
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_compute_after_their_parent_has(method, x, threads):
    openmp.set_threads(2)  # they start now; a forked child has none of them
    expected = convolved(x)
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(x, expected, results))
    child.start()
    child.join()
    assert child.exitcode == 0
    pid, number = results.get()
    assert pid == child.pid
    assert method != "fork" or number == 1
    assert files_named_after(pid) == []


def files_named_after(pid):
    """Return the files of a process in folders that all processes share."""
    folders = map(Path, ("/dev/shm", "/tmp"))
    return [path for folder in folders for path in folder.glob(f"*_{pid}_*")]


USES = """
import os, sys
import numpy
from chainer_fast.onednn.matrices import product

a = numpy.ones((256, 256), "f")
product(a, a)
print(os.getpid())
sys.stdout.flush()
"""


@needs_onednn
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_a_process_leaves_no_file(end, execute):
    result = execute(sys.executable, "-c", USES + end)
    assert result.returncode == (-9 if end else 0), result.stderr
    assert files_named_after(int(result.stdout)) == []


@needs_onednn
def test_the_openmp_of_another_package_may_be_there_already(python, tmp_path):
    # LLVM's OpenMP ends a process that has two of them.
    other = next(f for f in metadata.files(openmp.DISTRIBUTION) if f.name == "libomp.so")
    copy = shutil.copy(other.locate(), tmp_path)
    code = f"""
import ctypes
other = ctypes.CDLL({copy!r})
assert other.omp_get_max_threads() == 2
from chainer_fast.onednn import library, openmp
library.load()
openmp.set_threads(1)
print(other.omp_get_max_threads(), openmp.max_threads())
"""
    assert python(code, OMP_NUM_THREADS="2") == "2 1"


INTERRUPTED = """
import signal
import numpy
from chainer_fast.onednn.matrices import product

signals = []
signal.signal(signal.SIGALRM, lambda *_: signals.append(None))
gy, W = numpy.random.default_rng(0).normal(size=(2, 512, 512)).astype("f")
expected = product(gy, W)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0003)
is_right = True
while len(signals) < 500:
    is_right = is_right and (product(gy, W) == expected).all()
signal.setitimer(signal.ITIMER_REAL, 0)
print(is_right)
"""


def test_signals_that_arrive_during_a_product_leave_it_right(python):
    # Including signals that reach other threads, as some do on a busy machine.
    assert python(INTERRUPTED, OMP_NUM_THREADS="2") == "True"
