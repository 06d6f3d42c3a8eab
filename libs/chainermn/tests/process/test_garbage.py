"""Imports without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from chainermn.process.garbage import no_garbage_collection


@pytest.fixture(autouse=True)
def enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_what_the_user_has_set_stands(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    with pytest.raises(ImportError), no_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == was_enabled
