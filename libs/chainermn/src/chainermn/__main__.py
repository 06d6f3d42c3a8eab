"""The command ``chainermn``, also ``python -m chainermn``: launch, doctor and report."""

from __future__ import annotations

import click

from chainermn.doctor.command import doctor
from chainermn.launch.command import launch
from chainermn.process.streams import prepare_streams
from chainermn.profiling.report import report
from chainermn.version import VERSION


@click.group(
    commands=[launch, doctor, report], context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(VERSION)
def main() -> None:
    """Start distributed training, diagnose an installation, and show where time goes."""
    prepare_streams()


if __name__ == "__main__":
    main(prog_name="python -m chainermn")
