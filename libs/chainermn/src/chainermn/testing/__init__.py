"""Tools for testing code that runs on several ranks.

``pytest_plugins = ["chainermn.testing.pytest_plugin"]`` in a ``conftest.py`` makes plain
``pytest`` run every test marked ``@pytest.mark.mpi(2)`` on that many ranks;
`chainermn.testing.mpiexec.run_job` runs a script on several ranks.
"""

from chainermn.testing.device import get_device

__all__ = ["get_device"]
