"""``pkg_resources`` and ``numpy.distutils`` are gone."""

from types import ModuleType

from chainer_compat import surgery


def always() -> bool:
    # numpy.distutils warns where it still exists, up to Python 3.11.
    return True


def lacks_pkg_resources() -> bool:
    from importlib import metadata

    # From 67.5 on, importing it warns. (To import it and see would take long.)
    try:
        major, minor = metadata.version("setuptools").split(".")[:2]
    except metadata.PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (67, 5)


def no_environment_check(module: ModuleType) -> None:
    """Do not check the environment: what the check knows ends with CuPy 7."""

    def check() -> None:
        """Accept every environment."""

    vars(module)["check"] = check


def provide_requirements(module: ModuleType) -> None:
    """Give the module what it needs of ``pkg_resources``."""
    from chainer_compat import requirements

    surgery.substitute_imports(module, {"pkg_resources": requirements})
