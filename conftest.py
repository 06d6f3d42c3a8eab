"""Tests marked ``mpi`` run on several ranks; see `chainermn.testing.pytest_plugin`."""

pytest_plugins = ["chainermn.testing.pytest_plugin"]
