"""Command-line options that choose where ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from chainermn.launch.hosts import Host, parse_hosts, read_hostfile
from chainermn.launch.mpiexec import own_variables

Command = TypeVar("Command", bound=Callable[..., Any])


def host_options(command: Command) -> Command:
    """Add ``--host``, ``--hostfile``, ``--network`` and ``--forward`` to a command."""
    for option in (
        click.option(
            "--forward",
            metavar="VAR",
            multiple=True,
            help="Pass this environment variable to ranks on other hosts. Give it once per "
            "variable. Variables that begin with CHAINER are always passed.",
        ),
        click.option(
            "--network",
            metavar="CIDR",
            help="Restrict Open MPI to this network, such as 10.0.0.0/24. Needed if hosts also "
            "have addresses that do not reach each other, such as Docker's.",
        ),
        click.option(
            "--hostfile",
            metavar="FILE",
            callback=_reader(read_hostfile),
            help="File with one host per line: 'a:2' or 'a slots=2'.",
        ),
        click.option(
            "--host",
            metavar="LIST",
            callback=_reader(parse_hosts),
            help="Hosts, with the number of ranks on each: a:2,b:2.",
        ),
    ):
        command = option(command)
    return command


def one_of(host: list[Host] | None, hostfile: list[Host] | None) -> list[Host] | None:
    """Return the hosts from ``--host`` or ``--hostfile``; refuse both at once."""
    if host and hostfile:
        raise click.UsageError("give either --host or --hostfile, not both")
    return host or hostfile


def forwarded(forward: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables to pass to other hosts."""
    if missing := [name for name in forward if name not in environment]:
        raise click.UsageError(f"--forward {missing[0]}: this environment variable is not set")
    return list(dict.fromkeys((*forward, *own_variables(environment))))


def _reader(read: Callable[[str], list[Host]]) -> Callable[..., list[Host] | None]:
    """Return a callback that turns the text of an option into hosts."""

    def convert(
        context: click.Context, option: click.Parameter, text: str | None
    ) -> list[Host] | None:
        try:
            return read(text) if text else None
        except (OSError, ValueError) as error:
            raise click.BadParameter(str(error)) from error

    return convert
