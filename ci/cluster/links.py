"""The network of the hosts: a switch, and from it a link to each of them.

The switch is a network namespace that the first host knows by name, so that links can also be
changed by what runs there. Functions called ``set_`` return the commands that do so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.cluster import files, requirements
from ci.cluster.hosts import Host

#: Like Docker's: on every host the same address, by which no host reaches another.
DUPLICATE, DUPLICATE_ADDRESS = "docker0", "172.17.0.1/16"

#: The kernel remembers 1024 addresses that were asked for, for all network namespaces together,
#: and drops packets beyond that. More hosts than this are told the addresses of all others.
_MOST_THAT_ASK = 16

Command = list[str]
_AT_SWITCH = ["-netns", "switch"]
_SLOW_SWITCH = Path(__file__).with_name("slow_switch.py")


def connect(hosts: Sequence[Host], *, bridged: bool) -> None:
    """Make the switch, and a link from it to every host.

    Parameters
    ----------
    hosts : sequence of Host
    bridged : bool
        Whether the kernel passes frames on; `start_slow_switch` does otherwise.
    """
    at_switch = ["link add bridge type bridge", "link set bridge up"] if bridged else []
    for index, host in enumerate(hosts):
        peer = f"peer name eth0 address {_hardware_address(index)} netns {host.pid}"
        at_switch += [
            f"link add {host.name} type veth {peer}",
            f"link set {host.name} {'master bridge' if bridged else ''} up",
        ]
    first = hosts[0]
    run_on(first, [["ip", "netns", "add", "switch"]])
    # Run where the switch is known, but processes are counted as the machine does.
    enter = ["nsenter", f"--target={first.pid}", "--mount"]
    _run([*enter, "ip", *_AT_SWITCH, "-batch", "-"], at_switch)
    known = [
        f"neighbor add {files.address(index)} lladdr {_hardware_address(index)} dev eth0"
        for index in range(len(hosts))
    ]
    for index, host in enumerate(hosts):
        at_host = [f"address add {files.address(index)}/24 dev eth0", "link set eth0 up"]
        if len(hosts) > _MOST_THAT_ASK:
            at_host += known[:index] + known[index + 1 :]
        _run(host.command("ip", "-batch", "-"), at_host)


def _hardware_address(index: int) -> str:
    return f"02:00:00:00:00:{index:02x}"


def is_running(host: Host) -> bool:
    """Tell whether the kernel has noticed, up to a second later, that both ends of a link are up.

    Until then UCX, and with it MPICH, does not use it.
    """
    return " UP " in _run(host.command("ip", "-brief", "link", "show", "eth0"))


def start_slow_switch(hosts: Sequence[Host], latency: float) -> subprocess.Popen[str]:
    """Let frames spend ``latency`` seconds in the switch; return what ends with the first host."""
    arguments = [sys.executable, str(_SLOW_SWITCH), str(latency), *(host.name for host in hosts)]
    process = subprocess.Popen(
        hosts[0].command("ip", "netns", "exec", "switch", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=requirements.environment(),
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()  # once it has opened its ports, or has ended
    return process


def set_link(host: str, state: str) -> Command:
    """Return what pulls the plug of a host, or puts it in again; to be run on the first host.

    Parameters
    ----------
    host : str
    state : {'up', 'down'}
    """
    return ["ip", *_AT_SWITCH, "link", "set", host, state]


def set_rate(host: str, rate: str) -> tuple[Command, Command]:
    """Return what limits the speed of a link, by a token bucket at either end.

    Parameters
    ----------
    host : str
    rate : str
        As ``tc`` writes it, ``100mbit``; or ``off``.

    Returns
    -------
    to_host, from_host : list of str
        To be run on the first host and on ``host``.
    """
    action, limit = "replace", ["tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
    if rate == "off":  # what links have from the beginning
        limit = ["noqueue"]
    to_host = ["tc", *_AT_SWITCH, "qdisc", action, "dev", host, "root", *limit]
    return to_host, ["tc", "qdisc", action, "dev", "eth0", "root", *limit]


def set_duplicate(*, present: bool) -> list[Command]:
    """Return what gives a host the duplicate interface or takes it away; to be run on each."""
    if not present:
        return [["ip", "link", "delete", DUPLICATE]]
    peer = f"{DUPLICATE}-peer"
    return [
        ["ip", "link", "add", DUPLICATE, "type", "veth", "peer", "name", peer],
        ["ip", "address", "add", DUPLICATE_ADDRESS, "dev", DUPLICATE],
        ["ip", "link", "set", DUPLICATE, "up"],
        ["ip", "link", "set", peer, "up"],
    ]


def run_on(host: Host, commands: Iterable[Command]) -> None:
    """Run commands on a host.

    Raises
    ------
    subprocess.CalledProcessError
        If one fails; its standard error is in it.
    """
    for command in commands:
        _run(host.command(*command))


def _run(command: Command, lines: Iterable[str] = ()) -> str:
    try:
        ended = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            input="\n".join(lines),
            env=requirements.environment(),
        )
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)  # a traceback has no other place for it
        raise
    return ended.stdout
