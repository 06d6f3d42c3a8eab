"""A plug-in of pytest for `mutants`: tests that notice most, at the least cost, come first."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests on three ranks, which stay up, before those that start ranks of their own."""
    items.sort(key=lambda item: "n=3" not in item.nodeid)
