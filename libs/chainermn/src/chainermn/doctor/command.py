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
from chainermn.files import optional_path
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
        raise click.BadParameter(f"expected a number of at least 1, such as 25.6e6, got {text!r}")
    return number


@click.command
@click.option(
    "-n", "--ranks", type=click.IntRange(1), help="Number of ranks you want to start here."
)
@host_options
@click.option(
    "--script",
    metavar="PATH",
    type=optional_path,
    help="Script you want to start. Checks that it is the same on every host.",
)
@click.option(
    "--data",
    metavar="PATH",
    type=optional_path,
    help="File or folder that the script reads. Checks that it is the same on every host.",
)
@click.option(
    "--parameters",
    callback=_number,
    metavar="NUMBER",
    help="Number of parameters of your model, such as 25.6e6. Recommends how to send its "
    "gradients between hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
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
    """Find what is wrong with an installation, and say how to fix it.

    With several hosts, also measure the network between them, and recommend a communicator and
    its allreduce_grad_dtype and, with --parameters, a compression. The exit code is 1 if anything
    is wrong. Please paste the whole output into bug reports.
    """
    from chainermn.doctor import report  # rich takes longer to import than everything else

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
