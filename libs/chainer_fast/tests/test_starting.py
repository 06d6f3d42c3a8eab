"""A faster `import chainer`."""


def test_chainer_loads_scipy_when_it_is_used(python):
    loaded = "[name for name in sys.modules if name.startswith('scipy.')]"
    assert python(f"import chainer, sys; print({loaded})") == "[]"


def test_chainer_notices_that_scipy_is_missing(python):
    code = "from chainer.functions.math import erfinv; print(erfinv.available_cpu)"
    assert python(f"import sys; sys.modules['scipy'] = None; {code}") == "False"


def test_scipy_without_a_spec_is_there(python):
    code = "from chainer.functions.math import erfinv; print(erfinv.available_cpu)"
    stub = "import sys, types; sys.modules['scipy'] = types.ModuleType('scipy')"
    assert python(f"{stub}; {code}") == "True"
