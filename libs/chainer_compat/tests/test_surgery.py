"""The instruments that repairs use."""

import math
import types

import pytest

from chainer_compat import surgery


def area(radius):
    """Docstring."""
    return math.pi * radius**2, "pi r squared"


def test_a_view_differs_from_its_module_only_where_asked():
    view = surgery.view(math, pi=3)
    assert view.pi == 3
    assert view.sqrt is math.sqrt
    assert math.pi != 3


def test_imports_of_one_module_are_substituted():
    substitute = types.ModuleType("math")
    module = types.ModuleType("module")
    surgery.substitute_imports(module, {"math": substitute})
    exec("import math, math as m, os.path\nfrom os import sep\nlen([])", vars(module))
    assert module.math is module.m is substitute
    assert module.os.sep == module.sep
    import math as original

    assert original is math


def test_a_function_with_other_globals():
    copy = surgery.with_globals(area, math=surgery.view(math, pi=3))
    assert copy(2)[0] == 12
    assert area(2)[0] != 12
    assert (copy.__name__, copy.__doc__) == ("area", "Docstring.")


def test_renaming_and_replacing_text():
    function = surgery.with_globals(area)
    surgery.rename(function, "pi", "tau")
    surgery.replace_text(function, "pi r", "tau r")
    assert function(1) == (math.tau, "tau r squared")


def test_what_is_not_there_cannot_be_changed():
    with pytest.raises(LookupError, match="area was expected to use the name 'e'"):
        surgery.rename(area, "e", "tau")
    with pytest.raises(LookupError, match="area was expected to contain the text 'diameter'"):
        surgery.replace_text(area, "diameter", "radius")
