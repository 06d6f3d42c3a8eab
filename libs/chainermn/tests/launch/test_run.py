"""``chainermn.launch.run``: a function on several ranks, and all that can happen to it."""

from __future__ import annotations

import ast
import atexit
import ctypes
import errno
import importlib
import importlib.util
import io
import linecache
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import chainermn
from chainermn.launch import calls, run
from chainermn.launch import ranks as launch_ranks
from chainermn.launch.connections import take_endpoint
from chainermn.launch.mpiexec import find_mpiexec
from chainermn.launch.pickles import dumps
from chainermn.process.processes import numbers_in

# Seconds after which something must have hung, even on a busy machine.
LIMIT = 120
OFFSET = 10


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def add_up(numbers: np.ndarray) -> tuple[int, np.ndarray]:
    return world().rank, numbers + OFFSET + world().allreduce(world().rank)


@pytest.mark.each_mpi
def test_results_by_rank() -> None:
    results = run(add_up, np.arange(3), ranks=np.int64(3))
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, numbers in results:
        np.testing.assert_array_equal(numbers, np.arange(3) + 10 + 0 + 1 + 2)


def test_lambda_with_a_closure_in_another_thread() -> None:
    """It closes its output, too."""

    def start(factor: int) -> list[int]:
        return run(lambda x: sys.stdout.close() or factor * x, 2, ranks=1)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(start, 3).result() == [6]


def test_class_of_a_module_that_has_no_file() -> None:
    """From Python 3.13 on, importing ``collections`` makes ``collections.abc``."""
    assert len(dumps(Sequence)) < 100  # its name


class Refused(Exception):
    """An exception from a module that no rank can import."""


class Odd(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_on_rank_1(make: Callable[[], Exception]) -> None:
    comm = chainermn.create_communicator()
    print("before")
    if comm.rank == 1:
        raise make()
    comm.recv_obj(source=1)


@pytest.mark.each_mpi
def test_exception_of_one_rank_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused) as raised:
        run(raise_on_rank_1, lambda: Refused("not", "today"), ranks=2)
    assert raised.value.args == ("not", "today")
    (note,) = raised.value.__notes__
    assert note.startswith("Raised on rank 1:\nTraceback")
    assert "raise make()\n" in note
    assert "worker.py" not in note
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] before", "[rank 1] before"]
    assert [line for line in err.splitlines() if "chainermn: note:" not in line] == []


def compute_while_rank_1_raises() -> None:
    comm = chainermn.create_communicator()
    if comm.rank == 1:
        raise Refused
    sum(range(5 * 10**7))  # in C, so no other thread of this rank runs meanwhile


@pytest.mark.each_mpi
def test_ranks_that_are_slow_to_end_are_no_failures(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused):
        run(compute_while_rank_1_raises, ranks=2)
    assert "disappeared first" not in capfd.readouterr().err


def print_much_and_raise() -> None:
    # More than is read at once, printed faster than it is shown.
    print("\n".join(f"{number:050}" for number in range(20_000)))
    raise Refused


@pytest.mark.each_mpi
def test_output_before_an_exception_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused):
        run(print_much_and_raise, ranks=1)
    assert capsys.readouterr().out == "".join(f"[rank 0] {n:050}\n" for n in range(20_000))


class Wordy(Exception):
    """An exception that makes its message from its argument."""

    def __init__(self, number: object) -> None:
        super().__init__(f"got {number}")


class Leaving(Exception):
    """An exception that calls `sys.exit` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ()


@pytest.mark.parametrize(("kind", "text"), [(Wordy, "Wordy: got 3"), (Leaving, "Leaving: 3")])
def test_exception_that_comes_back_otherwise_is_told_by_its_text(
    kind: type[Exception], text: str
) -> None:
    def fail() -> None:
        raise kind(3)

    with pytest.raises(RuntimeError, match=rf"\b{text}\n"):
        run(fail, ranks=1)


def test_wrong_call_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    message = (
        r"^run: <lambda>\(\) does not take the 2 positional arguments given: too many positional "
        r"arguments\. The number of ranks is a keyword: run\(<lambda>, \.\.\., ranks=4\)$"
    )
    with pytest.raises(TypeError, match=message):
        run(lambda: None, 2, 2)


def raise_everywhere(error: str) -> None:
    raise Odd(error, f"on {world().rank}")


def test_exception_that_cannot_be_pickled_is_told_by_its_text() -> None:
    with pytest.raises(RuntimeError, match=r"Odd: wrong on 0\n") as raised:
        run(raise_everywhere, "wrong", ranks=1)
    assert "raise Odd(error" in raised.value.__notes__[0]


def exit_on_rank_1(how: str) -> None:
    comm = world()
    if comm.rank == 1:
        if how == "sys.exit":
            sys.exit("error: wrong")
        if how == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGTERM)
    comm.recv(source=1)


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sys.exit", r"rank 1 called sys\.exit\('error: wrong'\)"),
        ("os._exit", r"rank 1 of 2 (ended with exit code 3|was killed, crashed or)"),
        ("kill", r"rank 1 of 2 was killed by signal 15 \(SIGTERM\)"),
    ],
)
def test_rank_that_ends_too_early(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(exit_on_rank_1, how, ranks=2)


def fork_and_add(x: int) -> tuple[int, int]:
    child = os.fork()
    if not child:
        sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return world().allreduce(x), code


@pytest.mark.each_mpi
@pytest.mark.nightly
def test_child_that_the_function_forks() -> None:
    assert run(fork_and_add, 4, ranks=2) == [(8, 3)] * 2


def end_after_rank_1(link: Path) -> None:
    """On rank 0, end as soon as the link to rank 1 closes; there, let that be long before the end.

    Files close from the highest number down, and closing a large one takes a while.
    """
    numbers = numbers_in(os.environ)
    assert numbers is not None
    if numbers.rank == 0:
        link.read_bytes()
        os.kill(os.getpid(), signal.SIGKILL)
    large = ctypes.CDLL(None).memfd_create(b"large", 0)  # not every Python has it in os
    os.posix_fallocate(large, 0, 1 << 28)
    for number, file in [(100, large), (101, os.open(link, os.O_WRONLY))]:
        os.dup2(file, number)
        os.close(file)
    os._exit(3)


@pytest.mark.each_mpi
def test_first_rank_that_ends_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "link")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 (ended with exit code 3|was killed, cr)"):
        run(end_after_rank_1, tmp_path / "link", ranks=2)


def test_rank_that_fails_after_the_function() -> None:
    with pytest.raises(RuntimeError, match=r"returned on all 1 ranks, but .* exit code 7"):
        run(atexit.register, os._exit, 7, ranks=1)


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^the function .*<lambda> cannot be pickled"):
        run(lambda: lock)
    with pytest.raises(TypeError, match=r"^argument 2 of print cannot be pickled"):
        run(print, 1, lock)
    with pytest.raises(TypeError, match=r"^the result of rank 1 cannot be pickled.* of lock\n"):
        run(lambda: world().rank and threading.Lock(), ranks=2)


# Passes the communicator as a variable of the function, as an argument, and in a list.
SCRIPT_WITH_A_COMMUNICATOR = """\
import copy
import chainermn
from chainermn.launch import run

comm = chainermn.create_communicator()
assert copy.deepcopy([comm])[0] is comm
for function, *arguments in [(lambda: comm.rank,), (print, comm), (print, [comm])]:
    try:
        print(run(function, *arguments, ranks=2))
    except TypeError as error:
        print(error)
"""


def test_communicator_stays_in_its_process() -> None:
    message = "cannot be pickled, .*: a communicator belongs to the process that created it: call "
    with pytest.raises(TypeError, match=rf"^the result of rank 0 {message}"):
        run(chainermn.create_communicator, ranks=1)
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT_WITH_A_COMMUNICATOR],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 0, shown.stderr
    closure, argument, inner = shown.stdout.splitlines()
    assert re.match(rf"the function <lambda> {message}", closure)
    assert re.match(rf"argument 1 of print {message}", argument)
    assert re.match(rf"argument 1 of print {message}", inner)


class OnlyOnRanks:
    """An object that cannot be unpickled anywhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("nothing",)


def test_what_cannot_be_unpickled_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 0 cannot load the function or its arguments"):
        run(print, OnlyOnRanks(), ranks=1)
    with pytest.raises(RuntimeError, match=r"^the result of rank 0 cannot be unpickled"):
        run(OnlyOnRanks, ranks=1)


def test_output_that_the_caller_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    run(print, "ä→", ranks=1)
    assert screen.buffer.getvalue() == b"[rank 0] \\xe4\\u2192\n"


def test_process_that_the_function_leaves_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended, no matter how long `run` would wait for ranks."""
    monkeypatch.setattr(launch_ranks, "SECONDS_TO_LEAVE", float("inf"))
    monkeypatch.setattr(launch_ranks, "SECONDS_FOR_OUTPUT", 0.2)
    loop = "for i in $(seq 1000); do echo more; sleep 0.05; done; echo not ended"
    assert run(lambda: subprocess.Popen(["sh", "-c", loop]).pid > 0, ranks=1) == [True]
    assert "not ended" not in capsys.readouterr().out


def test_nobody_can_connect_while_the_function_runs() -> None:
    def connect() -> int:
        # The rank itself has already hidden the endpoint.
        lines = Path("/proc/self/environ").read_text().split("\0")
        endpoint = take_endpoint(dict(line.split("=", 1) for line in lines if line))
        with socket.socket() as stranger:
            return stranger.connect_ex(endpoint.addresses[0])

    assert run(connect, ranks=1) == [errno.ECONNREFUSED]


def test_strangers_do_not_hold_up_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before the ranks, say nothing, and stay."""
    strangers: list[socket.socket] = []

    def started(*arguments: Any, **options: Any) -> Any:
        (address,) = take_endpoint(dict(arguments[1])).addresses
        strangers.extend(socket.create_connection(address) for _ in range(200))
        return really_started(*arguments, **options)

    really_started = calls.started
    monkeypatch.setattr(calls, "started", started)
    assert run(os.getpid, ranks=1)[0] > 0
    for stranger in strangers:
        assert stranger.recv(1) == b""  # it has been dropped
        stranger.close()


def test_modules_of_the_working_directory_do_not_replace_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_mpiexec()
    (tmp_path / "random.py").write_text("raise ImportError('this is not random')\n")
    monkeypatch.chdir(tmp_path)
    assert run(os.getcwd, ranks=1) == [str(tmp_path)]


def test_library_that_the_caller_finds_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "chainermn").symlink_to(Path(chainermn.__file__).parent)
    code = (
        "import chainermn; from chainermn.launch import run\n"
        "print(chainermn.__file__, *run(lambda: chainermn.__file__, ranks=1))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.stdout.split() == [str(tmp_path / "chainermn/__init__.py")] * 2, shown.stderr


class Calls:
    """An object that calls a function while it is pickled."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        self.function()
        return int, ()


def test_pickling_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither thread may take a module off cloudpickle's list while the other still needs it."""
    apart: Any = types.ModuleType("apart")
    exec("class One:\n    pass\n\nclass Two:\n    pass\n", vars(apart))
    monkeypatch.setitem(sys.modules, "apart", apart)
    second_is_there, first_has_ended = threading.Event(), threading.Event()
    arrive, wait = Calls(second_is_there.set), Calls(lambda: first_has_ended.wait(LIMIT))
    second = [apart.One, arrive, wait, apart.Two]

    def start_second() -> None:
        pickled.append(threads.submit(dumps, second))
        second_is_there.wait(0.1)  # times out if the second waits for the first

    pickled: list[Future[bytes]] = []
    with ThreadPoolExecutor(1) as threads:
        dumps([apart.One, Calls(start_second)])
        first_has_ended.set()
        assert pickled[0].result() == dumps(second)


def print_much() -> None:
    rank = world().rank
    for number in range(200):
        print(rank, "ä", end=" ")
        print(number)
    os.write(2, f"from C {rank}\nno end of line".encode())


@pytest.mark.each_mpi
def test_output_begins_with_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run(print_much, ranks=2)
    out, err = capsys.readouterr()
    for rank in range(2):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank} ä {number}" for number in range(200)]
        mine = [line for line in err.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] from C {rank}", f"[rank {rank}] no end of line"]
    assert len(out.splitlines()) == 400


def test_output_comes_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "go on?" in text:
                (tmp_path / "yes").touch()
            return super().write(text)

    def ask() -> None:
        print("go on?")
        while not (tmp_path / "yes").exists():
            os.sched_yield()

    monkeypatch.setattr(sys, "stdout", Screen())
    assert run(ask, ranks=1) == [None]
    assert sys.stdout.getvalue() == "[rank 0] go on?\n"


def test_module_beside_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("def name():\n    return __name__, __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module("beside")
    assert run(beside.name, ranks=1) == [("beside", str(tmp_path / "beside.py"))]


def test_module_that_is_not_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test modules are like this in pytest's importlib mode."""
    (tmp_path / "apart.py").write_text("class Made:\n    pass\n\ndef make():\n    return Made()\n")
    spec = importlib.util.spec_from_file_location("apart", tmp_path / "apart.py")
    apart = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "apart", apart)
    spec.loader.exec_module(apart)
    (made,) = run(apart.make, ranks=1)
    assert isinstance(made, apart.Made)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_traceback_shows_lines_of_a_notebook() -> None:
    cell = "def divide(x):\n    return x / 0  # in a cell\n"
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 1>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ast.parse(cell), "<cell 1>", "exec"), names)
    with pytest.raises(ZeroDivisionError) as raised:
        run(names["divide"], 1, ranks=1)
    assert 'File "<cell 1>", line 2, in divide' in raised.value.__notes__[0]
    assert "return x / 0  # in a cell" in raised.value.__notes__[0]


# Has no main guard: if the ranks imported it, each would start a job.
SCRIPT = """\
import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from chainermn.launch import run

# A shell that starts a program in the background lets it ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def wait(folder, is_watched):
    import chainermn
    from mpi4py import MPI
    comm = chainermn.create_communicator() if is_watched else MPI.COMM_WORLD
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(folder, f"rank{comm.rank}").write_text(Path("/proc/self/maps").read_text())
    if comm.rank == 1:  # it holds the GIL, so that it cannot end anything itself
        ctypes.PyDLL(None).sleep(1000)
    receive = comm.recv_obj if is_watched else comm.recv
    receive(source=comm.rank)

print("at the top", flush=True)
run(wait, sys.argv[1], sys.argv[2] == "watched", ranks=2)
"""


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "watched"),
        (signal.SIGKILL, "watched"),
        (signal.SIGINT, "not watched"),  # so that no monitor cleans up
    ],
)
def test_end_of_the_caller_ends_all(
    number: signal.Signals,
    how: str,
    started: Any,
    wait_until: Callable[[Callable[[], bool]], bool],
    tmp_path: Path,
) -> None:
    script, folder, temporary = (tmp_path / name for name in ("script.py", "ranks", "temporary"))
    script.write_text(SCRIPT)
    folder.mkdir()
    temporary.mkdir()
    caller = subprocess.Popen(
        [sys.executable, script, folder, how],
        env={**started.environment, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert wait_until(lambda: len(list(folder.iterdir())) == 2 or caller.poll() is not None)
    caller.send_signal(number)
    out, err = caller.communicate(timeout=LIMIT)
    assert out == "at the top\n"
    # Python dies from the signal that interrupted it.
    assert caller.returncode == -number, err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert wait_until(lambda: not started.processes()), started.processes()
    # Neither MPI's files nor the ranks' shared memory may remain.
    maps = "".join(file.read_text() for file in folder.iterdir())
    shared = [Path(path) for path in re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)]
    assert wait_until(lambda: not list(temporary.iterdir())), list(temporary.iterdir())
    assert not [path for path in shared if path.exists()]


@pytest.mark.mpi(1, 2)
def test_no_job_inside_a_job() -> None:
    with pytest.raises(RuntimeError, match="impossible inside a job"):
        run(print, ranks=1)


def test_where_mpi_is_initialized_without_mpiexec() -> None:
    code = "from chainermn.launch import run; from mpi4py import MPI; print(run(int, ranks=2))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT
    )
    assert (shown.returncode, shown.stdout) == (0, "[0, 0]\n"), shown.stderr


def test_mpiexec_that_starts_nothing(
    flavor: str,
    only_mpiexec: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its last words are heard, even if they come while other programs keep the processor busy."""

    class OnABusyMachine(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            ready = super().select(0)
            (tmp_path / "go on").touch()
            time.sleep(0.05)
            return ready

    monkeypatch.setattr(selectors, "DefaultSelector", OnABusyMachine)
    sign = {"mpich": "HYDRA", "openmpi": "Open MPI"}[flavor]
    only_mpiexec(
        f'[ $1 = --version ] || until [ -e "{tmp_path}/go on" ]; do :; done; echo {sign}; exit 1'
    )
    with pytest.raises(RuntimeError, match=rf"ranks did not start: \[0, 1\].*{sign}"):
        run(int, ranks=2)


# Python imports sitecustomize when it starts.
SITECUSTOMIZE = """\
import os
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    os._exit(3)
"""


@pytest.mark.each_mpi
def test_rank_that_ends_before_it_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # MPICH's mpiexec waits for the other ranks, so give them no time to connect.
    monkeypatch.setattr(launch_ranks, "START_LIMIT", 0)
    with pytest.raises(RuntimeError, match=r"start: \[.*1\]; mpiexec ended with exit code 3"):
        run(int, ranks=2)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("PID 7 RUNNING AT a\n= KILLED BY: Real-time signal 6 (signal 40)", "Real-time signal 6"),
        ("PID 7 RUNNING AT a\n= KILLED BY: Segmentation fault (signal 11)", "SIGSEGV"),
        ("rank 0 with PID 7 on node a exited on\nsignal 15 (Terminated).", "SIGTERM"),
        ("PID 7 on node a exited on signal 40 (Real-time signal 6).", "Real-time signal 6"),
    ],
)
def test_name_of_a_signal(words: str, name: str) -> None:
    ((pid, number),) = launch_ranks.signals_in(words).items()
    assert (pid, launch_ranks.name_of(number)) == (7, name)


def test_keywords_are_refused() -> None:
    message = (
        r"got x; .* Use a lambda instead: run\(lambda: add_up\(\.\.\., x=\.\.\.\), ranks=2\)$"
    )
    with pytest.raises(TypeError, match=message):
        run(add_up, 1, x=3, ranks=2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"function": 5}, TypeError, "function must be callable, got 5"),
        ({"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
        ({"ranks": 2.0}, TypeError, "ranks must be a whole number, got 2.0"),
        ({"ranks": True}, TypeError, "ranks must be a whole number, got True"),
        ({"hosts": "a:x"}, ValueError, "expected a host such as a:2"),
        ({"hosts": [("a", -1)]}, ValueError, r"hosts must look like 'a:2,b:2' or"),
        ({"hosts": 3}, ValueError, r"hosts must look like 'a:2,b:2' or"),
        ({"hosts": [("a", 2), ("b", 1)]}, ValueError, "4 ranks do not fit on the hosts a:2,b:1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(**{"function": print, **arguments})
