"""Replace ``pkg_resources`` and ``numpy.distutils``, which are gone."""

from types import ModuleType

from chainer_compat import surgery


def lacks_pkg_resources() -> bool:
    from importlib import metadata

    # Importing it warns since version 67.5. Trying an import would take long.
    try:
        major, minor = metadata.version("setuptools").split(".")[:2]
    except metadata.PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (67, 5)


def no_environment_check(module: ModuleType) -> None:
    """Do not check the environment, since the check does not know CuPy 8 or later."""

    def check() -> None:
        """Accept every environment."""

    vars(module)["check"] = check


def provide_requirements(module: ModuleType) -> None:
    """Give the module the parts of ``pkg_resources`` that it needs."""
    from chainer_compat import requirements

    surgery.substitute_imports(module, {"pkg_resources": requirements})
