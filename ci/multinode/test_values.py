"""Paths, arguments and variables reach ranks on other hosts unchanged, whatever they contain.

Between the caller and a rank are one or two shells, ssh, and the messages of an mpiexec.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from chainermn.launch import run
from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job, output_of

SAY = Path(__file__).with_name("scripts") / "say_what_came.py"
# Each example takes a job, so it has many values. Every night draws others.
N_EXAMPLES = 2
N_VALUES = 40

KNOWN = [
    *("", " ", "a b", " a ", "'", '"', "it's", '"a b"', "'a b'", "\\", "\\\\", "a\\", "\\n"),
    *("\n", "a\nb", "\n\n", "a\r\nb", "\t", "\x1b[31m", "\x01\x7f", "é中", "\udcff\udc80"),
    *("$HOME", "${HOME}", "$(touch /tmp/no)", "`id`", "$'a'", "a;b", ";", "&", "&&", "|", "||"),
    *("<", ">a", "*", "?", "[a]", "{a,b}", "~", "!", "!!", "#", "# a", "%s%n", "=", "a=b", ","),
    *(
        "-x",
        "-n",
        "--",
        "--host",
        "@a",
        "a:b",
        "::",
        "(",
        ")",
        "()",
        "() { :; }; id",
        "^",
        "x" * 9999,
    ),
]
_CHARACTERS = " '\"\\$`(){}[];&|<>*?!#~%^=:,@-+\n\r\t\x1bab"
_ANY = st.text(_CHARACTERS) | st.text(st.characters(codec="utf-8")) | st.binary().map(os.fsdecode)
VALUES = _ANY.map(lambda text: text.replace("\0", ""))
# mpiexec takes a colon for the start of another program, so `chainermn launch` refuses it.
ARGUMENTS = VALUES.filter(lambda text: text != ":")
NAMES = VALUES.map(lambda text: "Z" + text.replace("=", "")[:200])
FOLDERS = VALUES.map(lambda text: "f" + os.fsdecode(os.fsencode(text.replace("/", ""))[:100]))


def many(values: st.SearchStrategy[str], **options: Any) -> st.SearchStrategy[list[str]]:
    return st.lists(values, min_size=N_VALUES, max_size=N_VALUES, **options)


def as_bytes(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


numbers = itertools.count()
some_settings = settings(
    max_examples=N_EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def make_folder(hosts: Hosts, path: Path, name: str) -> Path:
    """Make a folder with this name on the first two hosts; return its path."""
    folder = path / str(next(numbers)) / name
    hosts.check_all("mkdir", "-p", str(folder), on=hosts.names[:2])
    return folder


@seed(0)
@some_settings
@example(KNOWN, KNOWN, [f"Z{text}".replace("=", "") for text in KNOWN], "f $(id)\n'\"`\\\udcff")
@given(many(ARGUMENTS), many(VALUES), many(NAMES, unique_by=as_bytes), FOLDERS)
def test_launch(
    start_command: Callable[..., Job],
    hosts: Hosts,
    local_path: Path,
    arguments: Sequence[str],
    values: Sequence[str],
    names: Sequence[str],
    name: str,
) -> None:
    folder = make_folder(hosts, local_path, name)
    script, list_of_names = folder / f"{name}.py", folder / "names"
    variables = {
        f"{variable}{n}": value
        for n, (variable, value) in enumerate(zip(names, values, strict=True))
    }
    for path, content in {
        script: SAY.read_text(),
        list_of_names: json.dumps([*map(as_bytes, variables)]),
    }.items():
        write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        hosts.check_all(sys.executable, "-c", write, str(path), content, on=hosts.names[:2])
    launch = [sys.executable, "-m", "chainermn", "launch", "--host", ",".join(hosts.names[:2])]
    forward = [f"--forward={variable}" for variable in variables]
    command = ["env", "-C", str(folder), *launch, *forward, str(script), str(list_of_names)]
    assert output_of(start_command([*command, *arguments], env=variables).wait()) == ""
    for host in hosts.names[:2]:
        came = json.loads(hosts.check(host, "cat", str(folder / f"{host}.json")))
        assert came == {
            "script": as_bytes(str(script)),
            "folder": as_bytes(str(folder)),
            "arguments": [*map(as_bytes, arguments)],
            "variables": {as_bytes(n): as_bytes(value) for n, value in variables.items()},
        }


def what_came(names: Sequence[str], arguments: Sequence[str]) -> Any:
    return os.getcwd(), [os.environ.get(name) for name in names], arguments


@seed(0)
@some_settings
@example(KNOWN, KNOWN, "f $(id)\n'\"`\\\udcff")
@given(many(VALUES), many(VALUES), FOLDERS)
def test_run(
    hosts: Hosts, local_path: Path, arguments: list[str], values: Sequence[str], name: str
) -> None:
    folder = make_folder(hosts, local_path, name)
    # Only MPICH passes on variables with other names.
    variables = {f"CHAINERMN_VALUE_{number}": value for number, value in enumerate(values)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for variable, value in variables.items():
            patch.setenv(variable, value)
        came = run(what_came, [*variables], arguments, ranks=2, hosts=",".join(hosts.names[:2]))
    assert came == [(str(folder), [*values], arguments)] * 2
