"""The network of the hosts: a switch, and a link from it to each host.

The switch is a network namespace that the first host knows by name, so that programs there can
change links too. Functions named ``set_`` return commands that do so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.cluster import files, requirements
from ci.cluster.hosts import Host

#: As with Docker, every host has this address, and none reaches another through it.
DUPLICATE, DUPLICATE_ADDRESS = "docker0", "172.17.0.1/16"

#: The kernel caches 1024 neighbor addresses for all network namespaces together, and drops packets
#: beyond that. With more hosts than this, each host gets the addresses of all others in advance.
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
        Whether the kernel forwards frames; otherwise `start_slow_switch` does.
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
    # Run where the switch has its name, with the process ids of the machine.
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
    """Return whether the kernel has noticed that both ends of a link are up.

    That takes up to a second, and until then UCX, and therefore MPICH, does not use the link.
    """
    return " UP " in _run(host.command("ip", "-brief", "link", "show", "eth0"))


def start_slow_switch(hosts: Sequence[Host], latency: float) -> subprocess.Popen[str]:
    """Delay frames by ``latency`` seconds in the switch; return its process, on the first host."""
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
    """Return the command, for the first host, that unplugs a host or plugs it in again.

    Parameters
    ----------
    host : str
    state : {'up', 'down'}
    """
    return ["ip", *_AT_SWITCH, "link", "set", host, state]


def set_rate(host: str, rate: str) -> tuple[Command, Command]:
    """Return the commands that limit the speed of a link, by a token bucket at each end.

    Parameters
    ----------
    host : str
    rate : str
        In the notation of ``tc``, such as ``100mbit``; or ``off``.

    Returns
    -------
    to_host, from_host : list of str
        Commands to run on the first host and on ``host``.
    """
    action, limit = "replace", ["tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
    if rate == "off":  # as links have at first
        limit = ["noqueue"]
    to_host = ["tc", *_AT_SWITCH, "qdisc", action, "dev", host, "root", *limit]
    return to_host, ["tc", "qdisc", action, "dev", "eth0", "root", *limit]


def set_duplicate(*, present: bool) -> list[Command]:
    """Return the command, for each host, that adds or removes the duplicate interface."""
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
        If one fails; the error has its standard error.
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
        error.add_note(error.stderr)  # the only place for it in a traceback
        raise
    return ended.stdout
