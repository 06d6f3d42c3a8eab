"""Call a function on several ranks, from Python or from a notebook."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chainermn
from chainermn.failures.processes import launchers_of, numbers_in
from chainermn.launch.connections import JOB, Listener
from chainermn.launch.hosts import Host, fill_hosts, parse_hosts, parse_pairs
from chainermn.launch.job import started
from chainermn.launch.mpiexec import (
    find_mpiexec,
    launch_environment,
    mpiexec_command,
    own_variables,
)
from chainermn.launch.pickles import dump_call
from chainermn.launch.ranks import Ranks
from chainermn.launch.reachable import check_hosts

# Ranks use the caller's copy of this library, wherever it has been found.
_WORKER = (
    f"import sys; sys.path.insert(0, {str(Path(chainermn.__file__).parents[1])!r}); "
    "import chainermn; del sys.path[0]; from chainermn.launch.worker import main; main()"
)


def run(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 4,
    hosts: str | Iterable[Host] | None = None,
    **unexpected: Any,
) -> list[Any]:
    """Call a function on several ranks of a new job, and return their results.

    Use it in a notebook, in a script or in a test. Inside the function,
    `chainermn.create_communicator` connects the ranks, as in a script that ``mpiexec`` starts.
    You see the output of the ranks line by line while the function runs, with the rank in front,
    as ``[rank 2]``. Ctrl-C, or the stop button of a notebook, ends all ranks.

    You can define the function anywhere, also in a notebook or as a lambda, because cloudpickle
    sends it to the ranks. They do not import the caller's script, but find the same modules as
    the caller.

    Parameters
    ----------
    function : callable
        Function to call as ``function(*args)`` on every rank.
    *args
        Arguments that can be pickled. For keyword arguments, use
        ``run(lambda: function(x=3))``.
    ranks : int, default 4
        Number of ranks.
    hosts : str or list of (str, int), optional
        Hosts and their numbers of ranks: ``"a:2,b:2"`` or ``[("a", 2), ("b", 2)]``. Each host
        needs this environment at the same path, and ssh without a password. Hosts get the
        environment variables whose names start with ``CHAINER``, and with MPICH all others too.
        By default, all ranks run on this host.

    Returns
    -------
    list
        Results of the function, one per rank.

    Raises
    ------
    Exception
        If the function raises, its exception, with a note that names the rank and shows its
        traceback. If several ranks raise within a fifth of a second, that of the lowest rank. If
        the exception cannot be pickled, or changes when it is, RuntimeError with the same text.
        The other ranks are ended.
    RuntimeError
        If a rank is killed or exits, if ranks do not start, or if this process is a rank.
    ConnectionError
        If ssh cannot reach one of the hosts.
    TypeError, ValueError
        If an argument is invalid, or if the function, its arguments or a result cannot be
        pickled.
    KeyboardInterrupt
        If it is interrupted.

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
    places = None if hosts is None else fill_hosts(_parsed(hosts), ranks)
    _refuse_on_a_rank()
    call = dump_call(function, args)
    if places is not None:
        check_hosts(places, [str(find_mpiexec()), sys.executable, str(chainermn.__file__)])
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
    # Without -P, a random.py in the working directory would take the place of Python's.
    arguments = ["-u", "-P", "-c", _WORKER]
    return mpiexec_command(ranks, arguments, hosts=hosts, forward=[*forward]), environment


def _about_keywords(
    function: Callable[..., Any], args: Sequence[Any], keywords: Iterable[str], ranks: object
) -> str:
    name = getattr(function, "__name__", "")
    shown = ", ".join([*["..."] * len(args), *(f"{keyword}=..." for keyword in keywords)])
    return (
        f"run: expected no keywords except ranks and hosts, got {', '.join(keywords)}; run passes "
        "positional arguments only: use "
        f"run(lambda: {name if name.isidentifier() else 'function'}({shown}), ranks={ranks!r})"
    )


def _parsed(hosts: str | Iterable[Host]) -> list[Host]:
    try:
        return parse_hosts(hosts) if isinstance(hosts, str) else parse_pairs(hosts)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"run: hosts must be as 'a:2,b:2' or [('a', 2), ('b', 2)], got {hosts!r}: {error}"
        ) from None


def _refuse_on_a_rank() -> None:
    """Raise on a rank of a job, and in processes that it has started: mpiexec may hang there."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_rank = bool(
        mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1
    )
    if is_rank or (numbers_in(os.environ) and launchers_of(os.getpid())):
        raise RuntimeError(
            "run starts a job of its own, which is impossible inside a job: this process is one "
            "of its ranks, or has been started by one. Call run from a plain Python, or call the "
            "function itself on every rank"
        )
