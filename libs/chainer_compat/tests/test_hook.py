"""The hook: what it costs, where it works, and how it is switched off."""

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import chainer_compat
from chainer_compat import hook, loading, registry
from chainer_compat.registry import Repair

SOURCE = Path(chainer_compat.__file__).parents[1]
PROJECT = Path(__file__).parents[1]
# Without `site`, only the code of a test registers the hook or finds this package.
BY_HAND = f"import sys; sys.path += {[p for p in sys.path if p]!r}\n"


def test_the_hook_imports_nothing_else(python):
    loaded = python(
        f"import sys; sys.path.append({str(SOURCE)!r}); before = set(sys.modules)\n"
        "import chainer_compat; chainer_compat.install()\n"
        "print(sorted(set(sys.modules) - before))",
        "-I",
        "-S",
    )
    assert loaded == "['chainer_compat', 'chainer_compat.hook']"


def test_it_is_active_at_start_up_and_loads_neither_numpy_nor_chainer(python):
    code = (
        "import sys; from chainer_compat.hook import Finder\n"
        "print(sum(isinstance(f, Finder) for f in sys.meta_path),\n"
        "      [m for m in sys.modules if m.partition('.')[0] in {'numpy', 'chainer'}],\n"
        "      sorted(m for m in sys.modules if m.startswith('chainer_')))"
    )
    assert python(code) == "1 [] ['chainer_compat', 'chainer_compat.hook']"


@pytest.mark.parametrize(
    "flags",
    [("-W", "error"), ("-I", "-W", "error"), ("-E", "-s"), ("-O",), ("-X", "dev")],
    ids=str,
)
def test_chainer_imports_under(flags, python):
    assert python("import chainer; print(chainer.__version__)", *flags) == "7.8.1"


def test_onnx_chainer_may_be_imported_first(python):
    export = "onnx_chainer.export(chainer.links.Linear(2, 3), numpy.zeros((1, 2), 'f'))"
    code = f"import onnx_chainer, chainer, numpy; print({export}.graph.node[-1].op_type)"
    assert python(code) == "Gemm"


def test_it_can_be_installed_by_hand(python):
    code = (
        "import chainer_compat; chainer_compat.install(); chainer_compat.install()\n"
        "assert sum(type(f).__name__ == 'Finder' for f in sys.meta_path) == 1\n"
        "import chainer; print(chainer.__version__)"
    )
    assert python(BY_HAND + code, "-S") == "7.8.1"


def test_it_cannot_be_installed_too_late(python):
    code = "import chainer_compat; sys.modules['chainer'] = sys; chainer_compat.install()"
    assert "Call it first" in python(BY_HAND + code, "-S", fails=True)


@pytest.mark.parametrize("value", ["1", "yes"])
def test_it_can_be_switched_off(value, python):
    code = (
        "import importlib.util, chainer_compat.hook, sys\n"
        "(finder,) = (f for f in sys.meta_path if type(f).__name__ == 'Finder')\n"
        "print(finder.find_spec('chainer'), finder.find_spec('chainermn'), finder.names)\n"
        "print('chainer_compat.registry' in sys.modules)"
    )
    first, second = python(code, CHAINER_COMPAT_DISABLE=value).splitlines()
    assert first.startswith("None None")
    assert second == "False"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_have_it_too(method, python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def version(_):\n"
        "    import chainer\n"
        "    return chainer.__version__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:\n"
        "        print(pool.map(version, [0]))\n"
    )
    code = f"subprocess.run([sys.executable, {str(script)!r}, {method!r}], check=True)"
    assert python(f"import subprocess, sys; {code}") == "['7.8.1']"


def test_a_stale_pth_file_is_silent(python, tmp_path):
    (tmp_path / "chainer_compat.pth").write_text((PROJECT / "chainer_compat.pth").read_text())
    code = f"import site, sys; sys.stderr = sys.stdout; site.addsitedir({str(tmp_path)!r})\n"
    code += f"print(len(sys.meta_path), {str(tmp_path)!r} in sys.path)"
    assert python(code, "-I", "-S") == "3 True"


def test_the_start_file_names_the_same_function():
    assert pkgutil.resolve_name((PROJECT / "chainer_compat.start").read_text().strip()) is (
        chainer_compat.install
    )


def test_modules_look_as_if_they_had_been_imported_without_it():
    import chainer.reporter

    assert type(chainer.reporter.__loader__).__name__ == "SourceFileLoader"
    assert chainer.reporter.__spec__.loader is chainer.reporter.__loader__
    assert chainer.reporter.Summary.add.__doc__.lstrip().startswith("Adds a scalar")


def test_a_reloaded_module_is_repaired_again():
    from chainer.functions.math import fix

    original = fix.fix
    assert importlib.reload(fix).fix is not original
    assert fix.fix.__code__.co_names == original.__code__.co_names


def test_other_modules_pass_by():
    finder = hook.Finder()
    assert finder.find_spec("json") is None
    assert finder.find_spec("chainer.link") is None
    assert finder.names == {"chainer", "chainermn", "ideep4py", "onnx_chainer"}


def test_a_missing_module_stays_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    assert loading.find_repaired(hook.Finder(), "chainer.reporter", [], None) is None


def test_a_failing_repair_says_which_and_how_to_do_without_it(monkeypatch):
    def fail(module):
        raise LookupError("no such function")

    broken = Repair("broken", __name__, "a test", lambda: True, fail)
    monkeypatch.setattr(registry, "all_repairs", lambda: (broken,))
    with pytest.raises(
        RuntimeError, match=r"'broken'.*no such function.*CHAINER_COMPAT_SKIP=broken"
    ):
        registry.apply_repairs(sys.modules[__name__], "after")


def test_every_repair_has_a_name_of_its_own_and_a_module_that_exists():
    repairs = registry.all_repairs()
    assert len({repair.name for repair in repairs}) == len(repairs)
    for repair in repairs:
        assert importlib.util.find_spec(repair.module) is not None, repair
