"""A pytest plug-in for `mutants`: the tests that notice most at the least cost run first."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests on the pool of three ranks before those that start their own ranks."""
    items.sort(key=lambda item: "n=3" not in item.nodeid)
