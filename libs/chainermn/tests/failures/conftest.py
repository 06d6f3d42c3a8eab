"""What tests of the watch share."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest

from chainermn.launch.ending import Ending
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


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str | None]]:
    """Listen as the launcher of this process, which is rank 0 of 2.

    Returns a function that waits for the end of the job. It returns the lost host, or None if the
    job did not have to end.
    """
    with contextlib.ExitStack() as stack:
        ending = stack.enter_context(Ending(2))
        for name, value in {**ending.environment, "PMI_RANK": "0", "PMI_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)

        def wait() -> str | None:
            stack.close()
            return None if ending.began_at is None else ending.lost

        yield wait
