"""Installing, in every order, with every tool, and uninstalling again.

Needs a directory of wheels, named in CHAINERMN_WHEELHOUSE, because nothing is downloaded:
Chainer, its dependencies, packaging, hatchling and uv.
"""

import base64
import csv
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.venv
PROJECT = Path(__file__).parents[1]
DEPENDENCIES = ["numpy", "typing_extensions", "filelock", "protobuf", "six", "packaging"]


class Venv:
    """A virtual environment, and the tool that installs into it."""

    def __init__(self, folder, installer, house, execute):
        self._execute = execute
        self.python = folder / "bin" / "python"
        self.house = house
        self.installer = installer
        self.execute(sys.executable, "-m", "venv", "--without-pip", folder)
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))"))

    def execute(self, *command):
        result = self._execute(*command)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    def install(self, *what):
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--find-links", self.house]
        self.execute(*self._tool("install"), *options, *what)

    def uninstall(self, *what):
        self.execute(*self._tool("uninstall"), *what)

    def _tool(self, verb):
        if self.installer == "pip":
            yes = ["-y"] if verb == "uninstall" else ["--disable-pip-version-check"]
            return [sys.executable, "-m", "pip", "--python", self.python, verb, *yes]
        return [self.installer, "pip", verb, "--offline", "--python", self.python]

    def run(self, code, *flags):
        """Run code; return its output, including stderr, where Python reports start-up errors."""
        return self.execute(self.python, *flags, "-c", code).strip()

    def chainermn(self):
        return self.run("import importlib.util as u; print(u.find_spec('chainermn').origin)")

    def assert_chainer_is_intact(self):
        (record,) = self.site.glob("chainer-*.dist-info/RECORD")
        with record.open(newline="") as file:
            hashes = {name: digest for name, digest, _ in csv.reader(file) if digest}
        assert len(hashes) > 500
        for name, digest in hashes.items():
            sha256 = hashlib.sha256((self.site / name).read_bytes()).digest()
            encoded = base64.urlsafe_b64encode(sha256).rstrip(b"=").decode()
            assert digest == f"sha256={encoded}", f"{name} has changed"


@pytest.fixture(scope="module")
def house():
    folder = os.environ.get("CHAINERMN_WHEELHOUSE")
    if not folder:
        pytest.skip("set CHAINERMN_WHEELHOUSE to a directory of wheels")
    return Path(folder)


@pytest.fixture(scope="module", params=["pip", "uv"])
def venv(request, house, execute, tmp_path_factory):
    installer = request.param
    if installer == "pip" and not shutil.which("pip"):
        pytest.importorskip("pip", reason="pip is not installed")
    if installer == "uv":
        installer = find_uv(house, tmp_path_factory)
    venv = Venv(tmp_path_factory.mktemp("venv"), installer, house, execute)
    venv.install(*DEPENDENCIES, "hatchling", "pathspec", "pluggy", "trove-classifiers")
    if list(house.glob("tomlkit-*.whl")):
        venv.install("tomlkit")
    return venv


def find_uv(house, tmp_path_factory):
    """Return the command uv, unpacked from the directory of wheels if it is not installed."""
    found = shutil.which("uv")
    if found:
        return found
    wheels = sorted(house.glob("uv-*.whl"))
    if not wheels:
        pytest.skip("uv is not installed, and there is no wheel of it in CHAINERMN_WHEELHOUSE")
    folder = tmp_path_factory.mktemp("uv")
    shutil.unpack_archive(wheels[-1], folder, "zip")
    (binary,) = folder.glob("uv-*.data/scripts/uv")
    binary.chmod(0o755)
    return str(binary)


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """Return a copy of chainer_compat, and a small chainermn laid out like the real one."""
    folder = tmp_path_factory.mktemp("projects")
    compat = folder / "chainer_compat"
    shutil.copytree(PROJECT, compat, ignore=shutil.ignore_patterns("tests", "__pycache__", ".*"))
    package = folder / "chainermn" / "src" / "chainermn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import chainer\n")
    (folder / "chainermn" / "command").mkdir()
    (folder / "chainermn" / "command" / "chainermn_command.py").touch()
    (package / "version.py").write_text('VERSION = "8.0.0"\n')
    for name in ("README.md", "LICENSE"):
        (folder / "chainermn" / name).touch()
    shutil.copy(PROJECT.parent / "chainermn/pyproject.toml", folder / "chainermn")
    return {"chainer-compat": compat, "chainermn": folder / "chainermn"}


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
@pytest.mark.parametrize("chainer_first", [True, False], ids=["chainer first", "chainer last"])
def test_installing_and_uninstalling(venv, projects, chainer_first, editable):
    option = ["-e"] if editable else []
    ours = [(*option, projects["chainermn"]), (*option, projects["chainer-compat"])]
    orders = [("chainer",), *ours] if chainer_first else [*reversed(ours), ("chainer",)]
    for what in orders:
        venv.install(*what)
    bundled = str(venv.site / "chainermn" / "__init__.py")
    folder = projects["chainermn"] / "src" if editable else venv.site / "_chainermn_dist"
    try:
        venv.assert_chainer_is_intact()
        assert venv.chainermn() == str(folder / "chainermn" / "__init__.py")
        first, second = ("chainer", "chainermn")[:: 1 if chainer_first else -1]
        code = f"import {first}, {second}; print(chainer.__version__, chainermn.__file__)"
        expected = f"7.8.1 {folder / 'chainermn' / '__init__.py'}"
        assert venv.run(code, "-I", "-W", "error") == expected

        # Without chainer-compat, or without our chainermn, everything is as Chainer left it.
        venv.uninstall("chainer-compat" if editable else "chainermn")
        assert venv.chainermn() == bundled
        venv.assert_chainer_is_intact()
    finally:
        for name in ("chainer-compat", "chainermn", "chainer"):
            if list(venv.site.glob(f"{name.replace('-', '_')}-*.dist-info")):
                venv.uninstall(name)
    # pip leaves an empty folder _chainermn_dist.
    assert not [path for path in venv.site.rglob("*chainer*/**/*") if path.is_file()]
    assert not list(venv.site.glob("*chainer*.pth"))
    assert venv.run("import sys; print('chainer_compat' in sys.modules)") == "False"


def test_a_stale_editable_installation_is_silent(venv, projects, tmp_path):
    project = tmp_path / "chainer_compat"
    shutil.copytree(projects["chainer-compat"], project)
    venv.install("-e", project)
    project.rename(tmp_path / "moved")
    assert venv.run("print('silence')") == "silence"
    venv.uninstall("chainer-compat")
