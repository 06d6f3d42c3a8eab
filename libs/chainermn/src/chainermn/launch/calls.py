"""Call a function on several ranks, from Python or from a notebook."""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chainermn.launch.connections import JOB, Listener
from chainermn.launch.hosts import Host, fill_hosts, parse_hosts, parse_pairs
from chainermn.launch.job import started
from chainermn.launch.mpiexec import launch_environment, mpiexec_command, own_variables
from chainermn.launch.pickles import dump_call
from chainermn.launch.ranks import Ranks
from chainermn.launch.reachable import check_hosts, needed_files
from chainermn.process.processes import launchers_of, numbers_in
from chainermn.process.streams import prepare_streams

_PACKAGE = Path(__file__).parents[1]
# Ranks import this library from the same folder as the caller.
_WORKER = (
    f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r}); "
    "import chainermn; del sys.path[0]; from chainermn.launch.worker import main; main()"
)


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 4,
    hosts: str | Iterable[Host] | None = None,
    **unexpected: Any,
) -> list[Any]:
    """Call a function on several ranks of a new job, and return the results of all ranks.

    Works in a notebook, in a script and in a test. Inside the function, call
    `chainermn.create_communicator` as in a script that ``mpiexec`` starts. The output of the
    ranks appears line by line while the function runs, and each line begins with its rank, as in
    ``[rank 2]``. An interrupt (Ctrl-C, or the stop button of a notebook) ends all ranks.

    You can define the function anywhere, even in a notebook or as a lambda: cloudpickle sends it
    to the ranks. They do not import the caller's script, but they search the same folders for
    modules as the caller.

    Parameters
    ----------
    function : callable
        Function that every rank calls as ``function(*args)``.
    *args
        Positional arguments of the function, which must be picklable. For keyword arguments, use
        a lambda: ``run(lambda: function(x=3))``.
    ranks : int, default 4
        Number of ranks.
    hosts : str or list of (str, int), optional
        Hosts to run on, with the number of ranks on each: ``"a:2,b:2"`` or
        ``[("a", 2), ("b", 2)]``. Each host needs this environment at the same path, and ssh
        access without a password. MPICH passes all environment variables to them, and Open MPI
        those that begin with ``CHAINER``. By default, all ranks run on this host.

    Returns
    -------
    list
        Results in rank order.

    Raises
    ------
    Exception
        If the function raises on a rank. You get its exception, with a note that names the rank
        and shows its traceback, and all other ranks are ended. If several ranks raise within a
        fifth of a second, you get the exception of the lowest one. An exception that cannot be
        pickled arrives as a RuntimeError with the same text.
    RuntimeError
        If a rank is killed or exits, if ranks do not start, or if this process is a rank.
    ConnectionError
        If ssh cannot reach one of the hosts, or if a host lacks this Python, this library or, with
        MPICH, the current folder.
    TypeError, ValueError
        If an argument is wrong, if the function does not take its arguments, or if the function,
        its arguments or a result cannot be pickled.
    KeyboardInterrupt
        If you interrupt the call.

    Examples
    --------
    >>> def add_up(x):
    ...     comm = chainermn.create_communicator()
    ...     return comm.allreduce_obj(x + comm.rank)
    >>> chainermn.launch.run(add_up, 10, ranks=2)
    [21, 21]
    """
    if not callable(function):
        raise TypeError(f"run: function must be callable, got {function!r}")
    if unexpected:
        raise TypeError(_about_keywords(function, args, unexpected, ranks))
    if isinstance(ranks, bool) or not hasattr(ranks, "__index__"):
        raise TypeError(f"run: ranks must be a whole number, got {ranks!r}")
    ranks = operator.index(ranks)
    if ranks < 1:
        raise ValueError(f"run: ranks must be at least 1, got {ranks}")
    _check_arguments(function, args, ranks)
    places = None if hosts is None else fill_hosts(_parsed(hosts), ranks)
    prepare_streams()
    _refuse_on_a_rank()
    call = dump_call(function, args)
    if places is not None:
        check_hosts(places, needed_files(sys.executable, str(_PACKAGE / "__init__.py")))
    with (
        Listener(ranks, places) as listener,
        started(*_mpiexec(ranks, places, listener.environment), mark=JOB) as mpiexec,
        Ranks(ranks, listener, mpiexec) as workers,
    ):
        return workers.call(call)


def _mpiexec(
    ranks: int, hosts: Sequence[Host] | None, variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the ranks, and its environment."""
    environment = {**launch_environment(hosts), **variables}
    forward = dict.fromkeys((*variables, *own_variables(environment)))
    # Without -P, a random.py in the working directory would replace Python's own.
    arguments = ["-u", "-P", "-c", _WORKER]
    return mpiexec_command(ranks, arguments, hosts=hosts, forward=[*forward]), environment


def _check_arguments(function: Callable[..., Any], args: Sequence[Any], ranks: object) -> None:
    """Raise TypeError if the function does not take these arguments, before ranks start."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        shown = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"run: {shown}{signature} does not take the {len(args)} positional arguments given: "
            f"{error}. The number of ranks is a keyword: run({shown}, ..., ranks={ranks!r})"
        ) from None


def _about_keywords(
    function: Callable[..., Any], args: Sequence[Any], keywords: Iterable[str], ranks: object
) -> str:
    name = getattr(function, "__name__", "")
    shown = ", ".join([*["..."] * len(args), *(f"{keyword}=..." for keyword in keywords)])
    return (
        f"run: expected no keywords except ranks and hosts, got {', '.join(keywords)}; run passes "
        "only positional arguments to the function. Use a lambda instead: "
        f"run(lambda: {name if name.isidentifier() else 'function'}({shown}), ranks={ranks!r})"
    )


def _parsed(hosts: str | Iterable[Host]) -> list[Host]:
    try:
        return parse_hosts(hosts) if isinstance(hosts, str) else parse_pairs(hosts)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"run: hosts must look like 'a:2,b:2' or [('a', 2), ('b', 2)], got {hosts!r}: {error}"
        ) from None


def _refuse_on_a_rank() -> None:
    """Raise on a rank of a job and in processes started by one, where mpiexec may hang."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_rank = bool(
        mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1
    )
    if is_rank or (numbers_in(os.environ) and launchers_of(os.getpid())):
        raise RuntimeError(
            "run starts a new job, which is impossible inside a job: this process is a rank, or "
            "was started by one. Call run from a Python that mpiexec has not started, or call "
            "the function directly on every rank"
        )
