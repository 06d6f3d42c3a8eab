"""Emulate several hosts on one machine: ``python ci/cluster --help``."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

if not __package__:  # started as `python ci/cluster`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from ci.cluster import requirements
from ci.cluster.cluster import Cluster, ClusterError
from ci.cluster.hosts import Host

CANNOT = 3


def main() -> int:
    """Run the command line; return the exit code."""
    args = make_parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, exit_by_signal)
    try:
        return args.perform(Cluster(args.name), args) or 0
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"cluster: {' '.join(error.cmd)}: {error.stderr}".rstrip(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; its ``perform`` is the function to call."""
    parser = argparse.ArgumentParser(
        prog="cluster",
        description="Several hosts on one machine: host00, host01 and so on. Needs root.",
    )
    parser.add_argument("--name", default="lab", help="name of this cluster, if there are several")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(perform: Callable[..., int | None]) -> argparse.ArgumentParser:
        name, text = perform.__name__.rstrip("_"), perform.__doc__
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(perform=perform)
        return command

    starting = [add(up), add(run)]
    for command in (add(check), *starting):
        command.add_argument("--slurm", action="store_true", help="with Slurm on them")
    for command in starting:
        command.add_argument("--rate", help="of all links: 1gbit, 100mbit, ...")
        latency = "seconds that each frame takes"
        command.add_argument("--latency", type=float, default=0.0, help=latency)
        command.add_argument("number", metavar="N", type=int)
    executing = add(exec_)
    executing.add_argument("host", metavar="HOST")
    for command in (starting[1], executing):
        command.add_argument("program", metavar="CMD")
        command.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER)
    add(processes)
    linking = add(link)
    linking.add_argument("host", metavar="HOST")
    linking.add_argument("state", choices=["up", "down"])
    limiting = add(rate)
    limiting.add_argument("rate", metavar="RATE", help="1gbit, 100mbit, ...; or off")
    limiting.add_argument("host", metavar="HOST", nargs="?", help="of this link only")
    add(docker0).add_argument("state", choices=["on", "off"])
    add(down)
    return parser


def check(cluster: Cluster, args: argparse.Namespace) -> int:
    """Say what this machine lacks for emulated hosts; the exit code is then 3."""
    if missing := requirements.find_missing(for_slurm=args.slurm):
        print(missing)
    return CANNOT if missing else 0


def up(cluster: Cluster, args: argparse.Namespace) -> None:
    """Start N hosts and keep them up."""
    cluster.up(args.number, rate=args.rate, latency=args.latency, with_slurm=args.slurm)


def run(cluster: Cluster, args: argparse.Namespace) -> int:
    """Start N hosts, run CMD on the first, and end them."""
    with Cluster(f"{cluster.name}-{os.getpid()}") as own:
        own.up(
            args.number,
            rate=args.rate,
            latency=args.latency,
            with_slurm=args.slurm,
            ends_with_this_process=True,
        )
        return run_on(own.hosts()[0], args)


def exec_(cluster: Cluster, args: argparse.Namespace) -> int:
    """Run CMD in the current folder on a host that is up."""
    return run_on(cluster.host(args.host), args)


def run_on(host: Host, args: argparse.Namespace) -> int:
    """Run a command on a host; return its exit code, as a shell would."""
    code = subprocess.call(host.command(args.program, *args.arguments))
    return code if code >= 0 else 128 - code


def processes(cluster: Cluster, args: argparse.Namespace) -> None:
    """List the processes on the hosts: host, pid, command line."""
    for host in cluster.hosts():
        for pid, line in host.processes().items():
            print(host.name, pid, line)


def link(cluster: Cluster, args: argparse.Namespace) -> None:
    """Unplug a host from the network, or plug it in again."""
    cluster.set_link(args.host, args.state)


def rate(cluster: Cluster, args: argparse.Namespace) -> None:
    """Limit the speed of all links, or of one link."""
    cluster.set_rate(args.rate, args.host)


def docker0(cluster: Cluster, args: argparse.Namespace) -> None:
    """Give all hosts an interface with the same address, as Docker does."""
    cluster.set_duplicate(present=args.state == "on")


def down(cluster: Cluster, args: argparse.Namespace) -> None:
    """End the hosts and all processes on them."""
    cluster.down()


def exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit normally, so that hosts that are starting are ended too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
