"""Read lists of hosts, as users write them for either MPI, and print them."""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import TypeAlias

#: Name of a host, and the number of ranks it takes.
Host: TypeAlias = tuple[str, int]

# Excludes everything that ssh, srun or an mpiexec could take for an option, a list or a pattern.
_NAME = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*", re.ASCII)
_LONGEST_NAME = 255
# ChainerMN 1's documentation used cpu=4, which Open MPI accepted at that time.
_SLOTS = re.compile(r"(?:slots|cpus?)=(.*)")
_AROUND_EQUALS = re.compile(r"\s*=\s*")
_PLACES = re.compile(r"0*[1-9][0-9]{0,5}")
_MOST_RANKS = 999_999
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_IGNORED = re.compile(r"max[_-]slots=[0-9]+")
# Limits that keep us from reading a huge file that is not a hostfile.
_MOST_LINES, _LONGEST_LINE = 1_000_000, 4096
_SHOWN = 80


def parse_hosts(text: str) -> list[Host]:
    """Parse a list of hosts such as ``a:2,b:2``. A host without a number takes one rank."""
    return _merge(_parse_host(part) for part in text.split(","))


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Read the hosts in a file, one per line: ``host slots=4``, ``host:4`` or ``host``.

    ``cpu=4`` means the same as ``slots=4``. ``#`` begins a comment. A host without a number takes
    one rank. If a host appears several times, its numbers add up. ``max_slots=4`` is ignored.
    """
    with open(path, "rb") as file:
        lines = iter(functools.partial(file.readline, _LONGEST_LINE + 1), b"")
        if hosts := parse_lines(lines, os.fspath(path)):
            return hosts
    raise ValueError(f"{path} names no host")


def parse_lines(lines: Iterable[bytes], source: str) -> list[Host]:
    """Parse the lines of a hostfile; the result may be empty.

    ``source`` names their origin in the message of the ValueError.
    """
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            if number > _MOST_LINES:
                raise ValueError(f"expected at most {_MOST_LINES:,} lines")
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"expected at most {_LONGEST_LINE:,} bytes per line")
            # Editors on Windows begin a file with a byte-order mark.
            entry = line.partition(b"#")[0].decode("utf-8-sig", errors="backslashreplace").strip()
            if entry:
                hosts.append(_parse_host(entry))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return _merge(hosts)


def parse_pairs(pairs: Iterable[tuple[str, int]]) -> list[Host]:
    """Check pairs of a host's name and a number of ranks, and merge those of the same host."""
    return _merge(_parse_host(f"{name}:{places}") for name, places in pairs)


def fill_hosts(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """Fill hosts in order with ``ranks`` ranks; return each used host with its number of ranks."""
    hosts, left, filled = list(hosts), ranks, []
    for name, places in hosts:
        filled.append((name, min(left, places)))
        left -= min(left, places)
    if left:
        raise ValueError(
            f"{ranks} ranks do not fit on the hosts {show_places(hosts)}, which take "
            f"{ranks - left}; ask for fewer ranks, or let the hosts take more, as in a:2,b:2"
        )
    return [(name, places) for name, places in filled if places]


def count_ranks(hosts: Iterable[Host]) -> int:
    """Return the number of ranks that the hosts take together."""
    return sum(places for _, places in hosts)


def is_this_host(name: str) -> bool:
    """Tell whether a name or address belongs to this host."""
    if name == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, address[0]) for family, *_, address in found)


def show_places(hosts: Iterable[Host]) -> str:
    """Return hosts and their numbers of ranks in the form that ``--host`` takes: ``a:2,b:2``."""
    return ",".join(f"{name}:{places}" for name, places in hosts)


def show_hosts(names: Iterable[str]) -> str:
    """Abbreviate names as Slurm does: ``host[00-62,64], other``."""
    numbers: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        # `node` does not belong to `node[1-2]`.
        key = found.group(1, 3) if found else (name,)
        number = found[2] if found else ""
        runs = numbers.setdefault(key, [])
        last = runs[-1][-1] if runs else ""
        if last and number == str(int(last) + 1).zfill(len(last)):
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
    """Return each host's text, with hosts of the same text grouped."""
    alike: dict[str, list[str]] = {}
    for name, text in texts.items():
        alike.setdefault(text, []).append(name)
    return "; ".join(f"{show_hosts(names)}: {text}" for text, names in alike.items())


def printable(text: str) -> str:
    """Escape control characters, except newlines, so that a terminal does not obey them."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def _is_own(family: int, address: object) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _parse_host(entry: str) -> Host:
    shown = repr(entry[:_SHOWN])
    first, *words = _AROUND_EQUALS.sub("=", entry).split() or [""]
    name, colon, number = first.partition(":")
    slots = [found[1] for word in words if (found := _SLOTS.fullmatch(word))]
    ignored = [word for word in words if _IGNORED.fullmatch(word)]
    places = [number, *slots] if colon else slots
    is_known = len(slots) + len(ignored) == len(words) and len(places) <= 1
    if not name or not is_known or not all(re.fullmatch("[0-9]+", each) for each in places):
        raise ValueError(f"expected a host such as a:2 or 'a slots=2', got {shown}")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ValueError(
            "expected a host name made of letters, digits, '.', '-' and '_' that begins with a "
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
