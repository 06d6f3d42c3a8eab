"""Named settings of a communicator that can be changed after its creation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Configurable:
    """Attributes set within :meth:`config_scope` become settings, each object its own.

    A setting is read and changed as an attribute, or by name with :meth:`get_config` and
    :meth:`set_config`.
    """

    _config_names: tuple[str, ...] = ()
    _within_config_scope = False

    @property
    def within_config_scope(self) -> bool:
        """Whether attributes that are being set become settings."""
        return self._within_config_scope

    @contextlib.contextmanager
    def config_scope(self) -> Iterator[None]:
        """Make settings of the attributes that are set in the ``with`` block."""
        before = self._within_config_scope
        self._within_config_scope = True
        try:
            yield
        finally:
            self._within_config_scope = before

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self._within_config_scope and not name.startswith("_"):
            self._config_names = tuple(dict.fromkeys((*self._config_names, name)))

    def set_config(self, name: str, value: Any = True) -> None:
        """Change a setting; ValueError if there is none of that name."""
        self._check_name(name)
        setattr(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """Return the value of a setting, or without a name the dict of all of them."""
        if name is None:
            return {each: getattr(self, each) for each in self._config_names}
        self._check_name(name)
        return getattr(self, name)

    def _check_name(self, name: str) -> None:
        if name not in self._config_names:
            known = ", ".join(self._config_names)
            raise ValueError(f"unknown setting {name!r}; {type(self).__name__} has: {known}")
