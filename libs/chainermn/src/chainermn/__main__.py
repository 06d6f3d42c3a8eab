"""The command ``chainermn``, also ``python -m chainermn``: launch, doctor and report."""

from __future__ import annotations

import click

import chainermn
from chainermn.doctor.command import doctor
from chainermn.launch.command import launch
from chainermn.profiling.report import report


@click.group(
    commands=[launch, doctor, report], context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(chainermn.__version__)
def main() -> None:
    """Start distributed training, diagnose an installation, and show where time goes."""


if __name__ == "__main__":
    main(prog_name="python -m chainermn")
