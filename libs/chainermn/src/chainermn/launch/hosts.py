"""Lists of hosts, as users write them for either MPI, and as they are shown."""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import TypeAlias

#: Name of a host, and the number of ranks that it takes.
Host: TypeAlias = tuple[str, int]

# Nothing that ssh, srun or an mpiexec takes for an option, for several hosts or for a pattern.
_NAME = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*", re.ASCII)
_LONGEST_NAME = 255
# The documentation of ChainerMN 1 wrote cpu=4, as did Open MPI at that time.
_SLOTS = re.compile(r"(?:slots|cpus?)=(.*)")
_PLACES = re.compile(r"0*[1-9][0-9]{0,5}")
_MOST_RANKS = 999_999
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_IGNORED = re.compile(r"max[_-]slots=[0-9]+")
# Of a file that is no hostfile, little is read.
_MOST_LINES, _LONGEST_LINE = 1_000_000, 4096
_SHOWN = 80


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of a list such as ``a:2,b:2``. A host without a number takes one rank."""
    return _merge(_parse_host(part) for part in text.split(","))


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Return the hosts named in a file, one per line: ``host slots=4``, ``host:4`` or ``host``.

    ``cpu=4`` means the same as ``slots=4``. ``#`` begins a comment. A host without a number takes
    one rank. The numbers of a host that is named several times add up. ``max_slots=4`` is ignored.
    """
    with open(path, "rb") as file:
        lines = iter(functools.partial(file.readline, _LONGEST_LINE + 1), b"")
        if hosts := parse_lines(lines, os.fspath(path)):
            return hosts
    raise ValueError(f"{path} names no host")


def parse_lines(lines: Iterable[bytes], source: str) -> list[Host]:
    """Return the hosts that the lines of a hostfile name; there may be none.

    ``source`` is where the lines are from, for the message of the ValueError.
    """
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            if number > _MOST_LINES:
                raise ValueError(f"expected at most {_MOST_LINES:,} lines")
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"expected at most {_LONGEST_LINE:,} bytes in a line")
            if entry := line.partition(b"#")[0].decode(errors="backslashreplace").strip():
                hosts.append(_parse_host(entry))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return _merge(hosts)


def parse_pairs(pairs: Iterable[tuple[str, int]]) -> list[Host]:
    """Return the hosts of pairs of a name and a number of ranks."""
    return _merge(_parse_host(f"{name}:{places}") for name, places in pairs)


def fill_hosts(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """Return the hosts that ``ranks`` ranks fill, in order, and how many ranks each gets."""
    hosts, left, filled = list(hosts), ranks, []
    for name, places in hosts:
        filled.append((name, min(left, places)))
        left -= min(left, places)
    if left:
        raise ValueError(
            f"{ranks} ranks do not fit on the hosts {show_places(hosts)}, which take "
            f"{ranks - left}; ask for fewer, or give the hosts more places, as in a:2,b:2"
        )
    return [(name, places) for name, places in filled if places]


def count_ranks(hosts: Iterable[Host]) -> int:
    """Return how many ranks hosts take."""
    return sum(places for _, places in hosts)


def is_this_host(name: str) -> bool:
    """Tell whether a name or address is one of this host."""
    if name == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, address[0]) for family, *_, address in found)


def show_places(hosts: Iterable[Host]) -> str:
    """Return hosts and their places as ``--host`` takes them: ``a:2,b:2``."""
    return ",".join(f"{name}:{places}" for name, places in hosts)


def show_hosts(names: Iterable[str]) -> str:
    """Return the names in brief, as Slurm writes them: ``host[00-62,64], other``."""
    numbers: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        # `node` is none of `node[1-2]`.
        key = found.group(1, 3) if found else (name,)
        number = found[2] if found else ""
        runs = numbers.setdefault(key, [])
        if runs and number and number == _next(runs[-1][-1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = []
    for (before, *after), runs in numbers.items():
        parts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        part = runs[0][0] if len(runs) == len(runs[0]) == 1 else f"[{','.join(parts)}]"
        shown.append(f"{before}{part}{''.join(after)}")
    return ", ".join(shown)


def show_by_host(texts: Mapping[str, str]) -> str:
    """Return what there is to say of each host; hosts of which the same is said, together."""
    alike: dict[str, list[str]] = {}
    for name, text in texts.items():
        alike.setdefault(text, []).append(name)
    return "; ".join(f"{show_hosts(names)}: {text}" for text, names in alike.items())


def printable(text: str) -> str:
    """Return text from elsewhere with control characters escaped, so that no terminal obeys them.

    Ends of lines stay.
    """
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def _next(number: str) -> str:
    """Return the number that follows, with as many zeros in front."""
    return str(int(number) + 1).zfill(len(number))


def _is_own(family: int, address: object) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _parse_host(entry: str) -> Host:
    shown = repr(entry[:_SHOWN])
    first, *words = entry.split() or [""]
    name, colon, number = first.partition(":")
    slots = [found[1] for word in words if (found := _SLOTS.fullmatch(word))]
    ignored = [word for word in words if _IGNORED.fullmatch(word)]
    places = [number, *slots] if colon else slots
    is_known = len(slots) + len(ignored) == len(words) and len(places) <= 1
    if not name or not is_known or not all(re.fullmatch("[0-9]+", each) for each in places):
        raise ValueError(f"expected a host as in a:2 or 'a slots=2', got {shown}")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ValueError(
            "expected a host's name of letters, digits, '.', '-' and '_', which begins with a "
            f"letter or digit, got {shown}"
        )
    if not all(map(_PLACES.fullmatch, places)):
        raise ValueError(f"expected 1 to {_MOST_RANKS:,} ranks on a host, got {shown}")
    return name, int(places[0]) if places else 1


def _merge(hosts: Iterable[Host]) -> list[Host]:
    merged: dict[str, int] = {}
    for name, places in hosts:
        merged[name] = merged.get(name, 0) + places
    if (ranks := count_ranks(merged.items())) > _MOST_RANKS:
        raise ValueError(f"expected at most {_MOST_RANKS:,} ranks on all hosts, got {ranks:,}")
    return list(merged.items())
