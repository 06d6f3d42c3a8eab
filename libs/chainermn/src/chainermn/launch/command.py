"""``chainermn launch``: run mpiexec with all the options and variables that it needs."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from chainermn.launch import slurm
from chainermn.launch.elastic import run_elastic
from chainermn.launch.hosts import Host, count_ranks, fill_hosts
from chainermn.launch.membership import Discover, DiscoveryError, discover_by
from chainermn.launch.mpiexec import launch_settings, mpiexec_command, starts_by_srun
from chainermn.launch.options import forwarded, host_options, one_of
from chainermn.launch.reachable import check_hosts, needed_files
from chainermn.launch.restarts import run_to_end


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "-np",
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks. By default, as many as the hosts take.",
)
@host_options
@click.option(
    "--max-restarts",
    metavar="K",
    type=click.IntRange(0),
    default=0,
    help="If the job fails, restart it up to K times.",
)
@click.option(
    "--min-ranks",
    metavar="N",
    type=click.IntRange(1),
    help="Run on the hosts that are up, as long as they take at least N ranks.",
)
@click.option(
    "--discover",
    metavar="SCRIPT",
    help="Before each attempt, run SCRIPT, which prints one host per line: 'a:2' or 'a slots=2'.",
)
@click.option(
    "--wait",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=600,
    show_default=True,
    help="While the hosts take fewer than --min-ranks, wait this long for more.",
)
@click.option(
    "--stall-limit",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Set CHAINERMN_STALL_LIMIT: how long a rank waits before it looks for the cause.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m PROGRAM.")
@click.option("--dry-run", is_flag=True, help="Print the command instead of running it.")
@click.argument("program", nargs=-1, required=True, metavar="PROGRAM [ARGUMENTS]...")
def launch(
    ranks: int | None,
    host: list[Host] | None,
    hostfile: list[Host] | None,
    network: str | None,
    forward: Sequence[str],
    max_restarts: int,
    min_ranks: int | None,
    discover: str | None,
    wait: float,
    stall_limit: float | None,
    module: bool,
    dry_run: bool,
    program: Sequence[str],
) -> None:
    """Start PROGRAM on several ranks.

    This runs the mpiexec of the MPI that mpi4py uses. A Python script runs under this Python; any
    other program is started as it is. The exit code is that of mpiexec. Inside a Slurm allocation,
    you get one rank per task unless you name hosts. SIGINT and SIGTERM end the job without a
    restart. SIGUSR1 is passed on to the ranks.

    With --min-ranks or --discover, -n is the largest number of ranks, and a restart leaves out
    hosts that cannot be reached or that keep failing.
    """
    hosts = one_of(host, hostfile)
    if hosts and starts_by_srun():
        with _in_one_line(RuntimeError):  # on other hosts, srun would wait
            slurm.check_allocated([name for name, _ in hosts], os.environ)
    hosts = hosts or (None if discover else slurm_hosts())
    find_hosts = _discovery(hosts, discover, ranks, min_ranks)
    arguments = _found(program, module)
    own = {} if stall_limit is None else {"CHAINERMN_STALL_LIMIT": f"{stall_limit:g}"}
    prepare = functools.partial(_prepare, arguments, network, forward)
    if find_hosts and not dry_run:

        def make_command(
            hosts: list[Host], variables: Mapping[str, str]
        ) -> tuple[list[str], dict[str, str]]:
            command, added = prepare(hosts, count_ranks(hosts), {**own, **variables})
            return command, {**os.environ, **added}

        code = run_elastic(
            make_command,
            find_hosts,
            _files(arguments),
            min_ranks=min_ranks or 1,
            max_ranks=ranks,
            max_restarts=max_restarts,
            patience=wait,
        )
        sys.exit(code)
    if find_hosts:
        with _in_one_line(DiscoveryError):
            hosts = find_hosts()
        if not hosts:
            raise click.ClickException(f"{discover} names no host")
        ranks = min(ranks or count_ranks(hosts), count_ranks(hosts))
    if ranks is None:
        if hosts is None:
            raise click.UsageError("give the number of ranks, as in -n 4, or name hosts")
        ranks = count_ranks(hosts)
    command, added = prepare(hosts, ranks, own)
    if dry_run:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        click.echo(" ".join([*assignments, shlex.join(command)]))
        return
    if hosts:
        with _in_one_line(ConnectionError):
            check_hosts(fill_hosts(hosts, ranks), _files(arguments))
    sys.exit(run_to_end(command, {**os.environ, **added}, max_restarts))


@contextlib.contextmanager
def _in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that the user can fix into a one-line message, and exit."""
    try:
        yield
    except kinds as error:
        raise click.ClickException(str(error)) from error


def _prepare(
    arguments: Sequence[str],
    network: str | None,
    forward: Sequence[str],
    hosts: list[Host] | None,
    ranks: int,
    own: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of mpiexec, and the variables to add to the environment."""
    names = forwarded(forward, {**os.environ, **own})
    with _in_one_line(OSError, RuntimeError, ValueError):
        command = mpiexec_command(
            ranks, arguments, python=False, hosts=hosts, forward=names if hosts else ()
        )
        settings = launch_settings(hosts, network=network)
    # Variables that the user has set win.
    return command, {n: settings[n] for n in settings if n not in os.environ} | dict(own)


def _files(arguments: Sequence[str]) -> list[str]:
    """Return the paths of the files that each host needs to run this command."""
    # The arguments of other programs may be files that only one rank reads.
    scripts = [Path(it) for it in arguments[1:2] if arguments[0] == sys.executable]
    needed = [str(script) for script in scripts if script.is_absolute() and script.is_file()]
    with _in_one_line(OSError, RuntimeError):
        return needed_files(arguments[0], *needed)


def _discovery(
    hosts: list[Host] | None, discover: str | None, ranks: int | None, min_ranks: int | None
) -> Discover | None:
    """Return a function that finds the hosts of each attempt; None if they never change."""
    if discover is None and min_ranks is None:
        return None
    if discover is not None and hosts:
        raise click.UsageError("give either hosts or --discover, not both")
    if ranks is not None and min_ranks is not None and ranks < min_ranks:
        raise click.UsageError(f"-n {ranks} is less than --min-ranks {min_ranks}")
    if discover is not None:
        script = Path(discover).absolute()
        return discover_by(_found([str(script) if script.is_file() else discover], module=False))
    if not hosts:
        raise click.UsageError("--min-ranks needs --host, --hostfile or --discover")
    given = list(hosts)
    return lambda: given


def _found(program: Sequence[str], module: bool) -> list[str]:
    with _in_one_line(FileNotFoundError):
        return find_program(program, module)


def slurm_hosts() -> list[Host] | None:
    """Return the hosts of the Slurm allocation, if this is inside one."""
    with _in_one_line(RuntimeError):
        return slurm.allocated_hosts(os.environ)


def find_program(program: Sequence[str], module: bool) -> list[str]:
    """Return the command for each rank to run: a Python script, a module or any other command."""
    name, *arguments = program
    if module:
        return [sys.executable, "-m", *program]
    # Absolute, because ranks on other hosts may start in another folder.
    path = Path(name).absolute()
    if path.is_file() and _is_python(path):
        return [sys.executable, str(path), *arguments]
    if found := shutil.which(name):
        return [os.path.abspath(found), *arguments]
    if path.is_file():
        raise FileNotFoundError(f"{name} is not executable; try: chmod +x {shlex.quote(name)}")
    raise FileNotFoundError(f"{name}: neither a script in this folder nor a command on PATH")


def _is_python(path: Path) -> bool:
    if path.suffix == ".py":
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first
