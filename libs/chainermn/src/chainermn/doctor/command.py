"""``chainermn doctor``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from chainermn.doctor.checks import CHECKS
from chainermn.doctor.registry import Status, run_checks
from chainermn.doctor.setup import Setup
from chainermn.launch.hosts import Host
from chainermn.launch.options import forwarded, host_options, one_of


def _number(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise click.BadParameter(f"expected a number of at least 1, as 25.6e6, got {text!r}")
    return number


@click.command
@click.option("-n", "--ranks", type=click.IntRange(1), help="Ranks you mean to start here.")
@host_options
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Script you mean to start; must be the same on every host that you name.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="File or folder that it reads; must be the same on every host that you name.",
)
@click.option(
    "--parameters",
    callback=_number,
    metavar="NUMBER",
    help="Parameters of your model, as 25.6e6: how to send its gradients between the hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(
    ranks: int | None,
    host: list[Host] | None,
    hostfile: list[Host] | None,
    network: str | None,
    forward: Sequence[str],
    script: Path | None,
    data: Path | None,
    parameters: float | None,
    as_json: bool,
) -> None:
    """Find what is wrong with an installation, and say what to do.

    With several hosts, also measure the network between them, and recommend a communicator, its
    allreduce_grad_dtype and, for a number of parameters, a compression. The exit code is 1 if
    anything is wrong. Paste the whole output into a bug report.
    """
    from chainermn.doctor import report  # rich takes longer to import than all the rest

    setup = Setup(
        ranks=ranks,
        hosts=one_of(host, hostfile),
        script=script,
        data=data,
        forward=forwarded(forward, os.environ),
        network=network,
        parameters=parameters,
    )
    setup.ask_hosts()
    versions = report.versions()
    rows: Iterable[report.Row] = run_checks(CHECKS, setup)
    if as_json:
        rows = list(rows)
        click.echo(report.as_json(versions, rows))
    else:
        rows = report.show(versions, rows)
    sys.exit(any(finding.status is Status.BAD for _, finding in rows))
