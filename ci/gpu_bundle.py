#!/usr/bin/env python3
"""Make the folder that ``ci/prove_on_gpu.py`` installs from on a GPU machine without a network.

The folder holds the wheels that such a machine lacks, built or fetched here, and a small NCCL that
lets several ranks share one GPU. The machine must already have CuPy, PyTorch, NumPy and their
requirements.

    python ci/gpu_bundle.py build/gpu_bundle
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

if not __package__:  # started as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from ci.gpu_proof.prune_nccl import prune

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "ci/constraints"
LIBS = ("libs/chainer_compat", "libs/chainer_fast", "libs/chainermn")
#: Always installed, with an MPI: the machine lacks these, or has them for another MPI.
REPLACED = ("mpi4py", "nvidia-cudnn-frontend")
#: Installed if the machine lacks them, or has versions too old for the libraries.
ADDED = (
    *("cloudpickle", "click", "rich", "markdown-it-py", "mdurl", "pygments", "threadpoolctl"),
    *("typing-extensions", "packaging", "six", "filelock", "psutil", "polib", "protobuf"),
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy"),
    *("hypothesis", "sortedcontainers", "tensorboardx"),
)
NCCL, NCCL_FILE = "nvidia-nccl-cu13", "nvidia/nccl/lib/libnccl.so.2"
#: Platforms of wheels that the machine accepts, the newest first.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
MB = 1_000_000
# Its name and versions, perhaps with extras between.
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*\])?(.*)")
_PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def main() -> None:
    arguments = parse()
    replaced = (arguments.mpi, *REPLACED)
    names = [*replaced, *ADDED, *arguments.also]
    names = [name for name in dict.fromkeys(names) if name not in arguments.without]
    cache = arguments.cache.resolve()
    with tempfile.TemporaryDirectory() as made:
        bundle = Path(made, "bundle")
        wheels = bundle / "wheels"
        wheels.mkdir(parents=True)
        for wheel in [
            *fetch(names, arguments.python, cache),
            # There is no wheel: it is built once.
            *cached("wheel", ["chainer"], cache / "built", ["--no-binary", ":all:"]),
            *build_libs(Path(made, "libs")),
        ]:
            shutil.copy(wheel, wheels)
        if not arguments.no_nccl:
            shutil.copy(small_nccl(arguments.arch, cache), bundle)
        added = [name for name in names if name not in replaced]
        (bundle / "COMMIT").write_text(commit() + "\n")
        (bundle / "PYTHON").write_text(arguments.python + "\n")
        (bundle / "requirements.txt").write_text("\n".join(required(added)) + "\n")
        write_sums(bundle)
        show_sizes(bundle)
        if (size := sum(map(size_of, files_of(bundle)))) > arguments.limit * MB:
            sys.exit(
                f"the bundle takes {size / MB:.1f} MB, more than the {arguments.limit} MB of "
                f"--limit; leave something out by --without NAME, or --no-nccl"
            )
        shutil.rmtree(arguments.folder, ignore_errors=True)
        shutil.copytree(bundle, arguments.folder)
    print(f"made: {arguments.folder}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="folder to make; replaced if it exists")
    add("--python", default="3.12", help="that machine's Python (default: %(default)s)")
    add("--mpi", default="mpich", choices=("mpich", "openmpi"), help="default: %(default)s")
    add("--arch", type=int, default=90, help="its GPU's compute capability (default: %(default)s)")
    add("--also", action="append", default=[], metavar="NAME", help="add this package")
    add("--without", action="append", default=[], metavar="NAME", help="leave out this package")
    add("--no-nccl", action="store_true", help="save 15 MB, and a download of 305 MB")
    add("--limit", type=float, default=55, help="limit in MB for all files (default: %(default)s)")
    cache = ROOT / ".nox/.cache/gpu_bundle"
    add("--cache", type=Path, default=cache, help="folder for downloads (default: %(default)s)")
    return parser.parse_args()


def pins() -> dict[str, str]:
    """Return the locked releases by name, each with the hashes of its files."""
    found = {}
    for lock in ("tests", "mpich", "openmpi", "gpu"):
        text = (CONSTRAINTS / f"{lock}.txt").read_text()
        for pin in re.split(r"\n(?=\S)", text):
            if (match := re.match(r"[\w.-]+(?===)", pin)) is not None:
                # A release for newer Pythons follows the one for older Pythons.
                found[match[0]] = pin.strip()
    return found


def short_digest(pin: str) -> str:
    return hashlib.sha256(pin.encode()).hexdigest()[:16]


def fetch(names: Sequence[str], python: str, cache: Path) -> list[Path]:
    """Return the wheels of locked releases for a version of Python, cached ones if possible."""
    options = ["--only-binary", ":all:", "--python-version", python]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    return cached("download", names, cache / f"cp{python.replace('.', '')}", options)


def cached(command: str, names: Sequence[str], cache: Path, options: Sequence[str]) -> list[Path]:
    """Return the wheels of locked releases; ``pip`` gets those that are missing."""
    known = pins()
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"not locked in {CONSTRAINTS}: {', '.join(unknown)}")
    # Each release, and each set of its files, has its own folder.
    folders = {name: cache / f"{name}-{short_digest(known[name])}" for name in names}
    if missing := [name for name in names if not folders[name].exists()]:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            pinned, into = Path(place, "pins.txt"), Path(place, "wheels")
            pinned.write_text("\n".join(known[name] for name in missing))
            options = ["--no-deps", "--require-hashes", *options, "-r", str(pinned)]
            pip(command, *options, into=into)
            for wheel in sorted(into.iterdir()):
                name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
                own = Path(place, name)
                own.mkdir()
                wheel.rename(own / wheel.name)
                own.rename(folders[name])
    return [wheel for folder in folders.values() for wheel in folder.iterdir()]


def build_libs(into: Path) -> Iterator[Path]:
    """Yield the wheels of ``libs/``."""
    pip("wheel", "--no-deps", *(str(ROOT / lib) for lib in LIBS), into=into)
    yield from sorted(into.iterdir())


def pip(command: str, *arguments: str, into: Path) -> None:
    """Have pip put wheels into a folder; the same content always gives the same file."""
    tools = (CONSTRAINTS / "build.txt").as_uri()
    environment = {
        **os.environ,
        "PIP_BUILD_CONSTRAINT": tools,
        "SOURCE_DATE_EPOCH": "1577836800",  # 2020
    }
    destination = {"download": "--dest", "wheel": "--wheel-dir"}[command]
    ended = subprocess.run([*_PIP, command, destination, str(into), *arguments], env=environment)
    if ended.returncode != 0:  # pip has said why
        sys.exit(f"pip could not {command} the packages, see above; it needs a network")


def small_nccl(architecture: int, cache: Path) -> Path:
    """Return NCCL for one kind of GPU, compressed by xz."""
    path = cache / f"nccl-{short_digest(pins()[NCCL])}-{architecture}" / "libnccl.so.2.xz"
    if not path.exists():
        (wheel,) = fetch([NCCL], HERE, cache)
        with zipfile.ZipFile(wheel) as archive:
            library = bytearray(archive.read(NCCL_FILE))
        try:
            prune(library, architecture)
        except ValueError as error:
            sys.exit(f"{error}; choose one of these by --arch, or leave NCCL out by --no-nccl")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(lzma.compress(library, preset=6))
        part.rename(path)
        shutil.rmtree(wheel.parent)  # 305 MB
    return path


def required(names: Iterable[str]) -> list[str]:
    """Return the requirement of each package: the libraries' or their tests', or its name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in [*(ROOT / lib / "pyproject.toml" for lib in LIBS), ROOT / "pyproject.toml"]:
        content = tomllib.loads(path.read_text())
        project = content.get("project", {})
        groups = [
            project.get("dependencies", []),
            *project.get("optional-dependencies", {}).values(),
            *content.get("dependency-groups", {}).values(),
        ]
        for line in (line for group in groups for line in group if isinstance(line, str)):
            match = _REQUIREMENT.fullmatch(line.partition(";")[0].strip())
            assert match is not None, line
            found[match[1]] |= {match[2]} - {""}
    return [name + ",".join(sorted(found[name])) for name in names]


def commit() -> str:
    """Return the name of this commit, if git can tell."""
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(FileNotFoundError):
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return shown.stdout.strip() or "unknown"
    return "unknown"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(path: Path) -> int:
    return path.stat().st_size


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(folder: Path) -> None:
    """Write checksums for ``sha256sum --check``."""
    lines = [f"{sha256(path)}  {path.relative_to(folder)}\n" for path in files_of(folder)]
    (folder / "SHA256SUMS").write_text("".join(lines))


def show_sizes(folder: Path) -> None:
    paths = sorted(files_of(folder), key=size_of, reverse=True)
    for path in paths:
        print(f"{size_of(path) / MB:8.3f} MB  {path.relative_to(folder)}")
    print(f"{sum(map(size_of, paths)) / MB:8.3f} MB  in total")


if __name__ == "__main__":
    main()
