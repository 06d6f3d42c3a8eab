"""Test code that runs on several ranks.

With ``pytest_plugins = ["chainermn.testing.pytest_plugin"]`` in a ``conftest.py``, plain
``pytest`` runs a test marked ``@pytest.mark.mpi(2)`` on two ranks. To run a script on several
ranks, call `chainermn.testing.mpiexec.run_job`.
"""

from chainermn.testing.device import get_device

__all__ = ["get_device"]
