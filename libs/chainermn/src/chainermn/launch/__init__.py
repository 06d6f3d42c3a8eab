"""Start jobs: `run` calls a function on several ranks, ``chainermn launch`` starts a program.

Both use the ``mpiexec`` of the MPI that mpi4py loads, with the options that this MPI needs.
"""

from chainermn.launch.calls import run

__all__ = ["run"]
