"""``chainermn launch``: mpiexec with all the options and variables that it needs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from chainermn.launch import slurm
from chainermn.launch.hosts import Host, fill_hosts
from chainermn.launch.mpiexec import launch_settings, mpiexec_command
from chainermn.launch.options import forwarded, host_options, one_of
from chainermn.launch.reachable import check_reachable
from chainermn.launch.restarts import run_to_end


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks; by default, as many as the hosts take.",
)
@host_options
@click.option(
    "--max-restarts",
    metavar="K",
    type=click.IntRange(0),
    default=0,
    help="Restart a job that fails, at most K times.",
)
@click.option(
    "--stall-limit",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Set CHAINERMN_STALL_LIMIT: how long ranks wait before they look for the cause.",
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
    stall_limit: float | None,
    module: bool,
    dry_run: bool,
    program: Sequence[str],
) -> None:
    """Start PROGRAM on several ranks, with the mpiexec of the MPI that mpi4py uses.

    A Python script runs under this Python; any other program is started as it is. The exit code
    is that of mpiexec. Inside a Slurm allocation, the ranks are its tasks, unless you name hosts.
    SIGINT and SIGTERM end the job, and it is not restarted. SIGUSR1 is passed on to the ranks.
    """
    hosts = one_of(host, hostfile) or slurm_hosts()
    if ranks is None:
        if hosts is None:
            raise click.UsageError("say how many ranks, as in -n 4, or name hosts")
        ranks = sum(places for _, places in hosts)
    own = {} if stall_limit is None else {"CHAINERMN_STALL_LIMIT": f"{stall_limit:g}"}
    environment = {**os.environ, **own}
    names = forwarded(forward, environment)
    try:
        command = mpiexec_command(
            ranks,
            find_program(program, module),
            python=False,
            hosts=hosts,
            forward=names if hosts else (),
        )
        settings = launch_settings(hosts, network=network)
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    # Variables that the user has set win.
    added = {name: settings[name] for name in settings if name not in os.environ} | own
    if dry_run:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        click.echo(" ".join([*assignments, shlex.join(command)]))
        return
    if hosts:
        try:
            check_reachable(fill_hosts(hosts, ranks))
        except ConnectionError as error:
            raise click.ClickException(str(error)) from error
    sys.exit(run_to_end(command, {**environment, **added}, max_restarts))


def slurm_hosts() -> list[Host] | None:
    """Return the hosts of the Slurm allocation, if this is inside one."""
    try:
        return slurm.allocated_hosts(os.environ)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


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
    raise FileNotFoundError(f"{name}: neither a script in this folder nor a command on PATH")


def _is_python(path: Path) -> bool:
    if path.suffix == ".py":
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first
