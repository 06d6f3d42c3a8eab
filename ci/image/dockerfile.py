"""Carry out a Dockerfile without Docker, in a root file system made by debootstrap."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from string import Template

from ci.image.system import System

#: Release of Debian for each image that FROM may name.
RELEASES = {"debian:12": "bookworm"}


class Image(System):
    """A root file system made by a Dockerfile.

    Parameters
    ----------
    root : Path
        An empty folder.
    lent : Path
        A folder of this machine, which processes see under the same path.
    env : dict
        Variables for the steps, such as where packages come from.
    """

    def __init__(self, root: Path, lent: Path, env: dict[str, str]) -> None:
        super().__init__(root, lent)
        self._build_env = env

    def build(self, dockerfile: Path, context: Path) -> None:
        """Carry out all instructions; unknown ones are an error."""
        for name, value in instructions(dockerfile.read_text(encoding="utf-8")):
            match name:
                case "FROM":
                    self.debootstrap(RELEASES[value])
                case "ENV":
                    pairs = (word.split("=", 1) for word in shlex.split(value))
                    self.env |= {key: Template(text).substitute(self.env) for key, text in pairs}
                case "COPY":
                    *sources, into = shlex.split(value)
                    for source in sources:
                        self._copy(context / source, into)
                case "RUN":
                    self.run(value, **self._build_env)
                case _:
                    raise ValueError(f"{dockerfile}: {name} is not known here")

    def _copy(self, source: Path, into: str) -> None:
        target = self.root / into.lstrip("/")
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=leave)
        else:
            target = target / source.name if into.endswith("/") else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments of each instruction of a Dockerfile."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, value = line.partition(" ")
        yield name.upper(), value.strip()
