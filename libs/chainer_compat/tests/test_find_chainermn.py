"""Which `chainermn` is imported: ours, wherever it is, or Chainer's copy if there is no other."""

import sys

import pytest

from chainer_compat import loading


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Make folders with packages in them; return a function that puts folders on sys.path."""

    def set_path(*folders):
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder) for folder in folders])

    for package in (
        "site/chainer",
        "site/chainermn",
        "wheel/chainer",
        "wheel/chainermn",
        "wheel/_chainermn_dist/chainermn",
        "src/chainermn",
    ):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "namespace" / "chainermn").mkdir(parents=True)
    return set_path


@pytest.mark.parametrize(
    "folders, found",
    [
        (["site"], None),
        (["wheel"], "wheel/_chainermn_dist"),
        (["site", "src"], "src"),
        (["src", "site"], "src"),
        (["site", "wheel"], "wheel/_chainermn_dist"),
        (["wheel", "src"], "wheel/_chainermn_dist"),
        (["src", "wheel"], "src"),
        (["namespace", "site", "src"], "src"),
        (["namespace", "absent"], None),
        ([], None),
    ],
    ids=str,
)
def test_the_first_one_that_is_not_beside_chainer(folders, found, path, tmp_path):
    path(*folders)
    spec = loading.find_chainermn()
    if found is None:
        assert spec is None
    else:
        assert spec.origin == str(tmp_path / found / "chainermn" / "__init__.py")
        assert spec.submodule_search_locations == [str(tmp_path / found / "chainermn")]


def test_the_current_directory(path, tmp_path, monkeypatch):
    path("site")
    sys.path.insert(0, "")
    monkeypatch.chdir(tmp_path / "src")
    assert loading.find_chainermn().origin == str(tmp_path / "src/chainermn/__init__.py")


@pytest.fixture
def ours(tmp_path):
    """Create a `chainermn` package with a pytest plugin, as in an editable install."""
    plugin = tmp_path / "src" / "chainermn" / "testing" / "plugin.py"
    plugin.parent.mkdir(parents=True)
    for folder in plugin.parents[:2]:
        (folder / "__init__.py").touch()
    plugin.write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def two():\n"
        "    return 2\n"
        "def is_three(number):\n"
        "    assert number == 3\n"
    )
    return tmp_path / "src"


@pytest.mark.parametrize(
    "first",
    ["", "import chainer; ", "import numpy; "],
    ids=["chainermn first", "chainer", "numpy"],
)
def test_a_script_gets_ours(first, ours, python):
    code = f"import sys; sys.path.append({str(ours)!r}); {first}"
    code += "import chainermn, chainer; print(chainermn.__file__); print(chainer.__file__)"
    found, chainer = python(code).splitlines()
    # If a chainermn is installed, it comes before the one at the end of sys.path.
    assert found != chainer.replace("/chainer/", "/chainermn/")


def test_the_bundled_copy_on_request(ours, python):
    code = f"import sys; sys.path.append({str(ours)!r}); import importlib.util\n"
    code += "print(importlib.util.find_spec('chainermn').origin)\n"
    code += "print(importlib.util.find_spec('chainer').origin)"
    origins = python(code, CHAINER_COMPAT_BUNDLED_CHAINERMN="1").splitlines()
    assert origins[0] == origins[1].replace("/chainer/", "/chainermn/")


def test_a_plugin_for_pytest_is_ours_and_its_assertions_are_rewritten(ours, python, tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ours)!r})\n"
        "pytest_plugins = ['chainermn.testing.plugin']\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from chainermn.testing import plugin\n"
        "def test_it(two):\n"
        "    with pytest.raises(AssertionError, match='assert 2 == 3'):\n"
        "        plugin.is_three(two)\n"
    )
    arguments = ["-q", "-p", "no:cacheprovider", str(tmp_path)]
    code = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
    assert "1 passed" in python(code)
