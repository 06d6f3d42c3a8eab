"""Settings of a communicator that you can change after you have created it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Configurable:
    """An object whose attributes become settings if they are set in a :meth:`config_scope`.

    Read and change a setting as an attribute, or by name with :meth:`get_config` and
    :meth:`set_config`.
    """

    _config_names: tuple[str, ...] = ()
    _within_config_scope = False

    @property
    def within_config_scope(self) -> bool:
        """Whether attributes that are set now become settings."""
        return self._within_config_scope

    @contextlib.contextmanager
    def config_scope(self) -> Iterator[None]:
        """Turn the attributes that are set in the ``with`` block into settings.

        Examples
        --------
        >>> with comm.config_scope():
        ...     comm.verbose = True
        >>> comm.get_config("verbose")
        True
        """
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
        """Change a setting.

        Parameters
        ----------
        name : str
            Name of an existing setting.
        value : object
            New value.

        Raises
        ------
        ValueError
            If there is no setting of that name.

        Examples
        --------
        >>> comm.set_config("allreduce_grad_dtype", np.float16)
        >>> comm.allreduce_grad_dtype
        dtype('float16')
        """
        self._check_name(name)
        setattr(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """Return the value of a setting, or a dict of all settings.

        Parameters
        ----------
        name : str, optional
            Name of a setting; all settings by default.

        Raises
        ------
        ValueError
            If there is no setting of that name.

        Examples
        --------
        >>> comm.get_config()
        {'allreduce_grad_dtype': None, 'batched_copy': True}
        """
        if name is None:
            return {each: getattr(self, each) for each in self._config_names}
        self._check_name(name)
        return getattr(self, name)

    def _check_name(self, name: str) -> None:
        if name not in self._config_names:
            known = ", ".join(self._config_names)
            raise ValueError(f"unknown setting {name!r}; {type(self).__name__} has: {known}")
