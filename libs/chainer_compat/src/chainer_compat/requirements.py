"""The small part of ``pkg_resources`` that ``chainer.testing`` uses."""

from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement


class ResolutionError(Exception):
    """Raised if a requirement is not met."""


class WorkingSet:
    """The installed distributions."""

    def require(self, *requirements: str) -> None:
        """Check that distributions are installed, in suitable versions.

        Parameters
        ----------
        *requirements
            Requirements such as ``"numpy>=2"``. Those whose environment markers do not hold are
            ignored.

        Raises
        ------
        ResolutionError
            If a distribution is missing or has the wrong version.
        ValueError
            If a string is not a requirement.
        """
        for text in requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                raise ValueError(f"{text!r} is not a requirement such as 'numpy>=2'") from error
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError as error:
                raise ResolutionError(f"{text} is required, but it is not installed") from error
            if not requirement.specifier.contains(version, prereleases=True):
                raise ResolutionError(f"{text} is required, but {version} is installed")
