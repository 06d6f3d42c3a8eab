"""What tests of the watch share."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from libs.chainermn.tests.process.stand_in_job import start_job as start_job


def select_with(
    selector: selectors.BaseSelector, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a module wait with this selector, which shows the test whom the module hears."""
    names = {"DefaultSelector": lambda: selector, "EVENT_READ": selectors.EVENT_READ}
    monkeypatch.setattr(module, "selectors", SimpleNamespace(**names))


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns new text on standard error."""
    return lambda: capfd.readouterr().err
