"""Move bytes: a few collectives on one flat array, over MPI, shared memory or NCCL.

This does not depend on Chainer. Creating a communicator loads ``mpi4py.MPI`` and NCCL; importing
a module of this folder never does.
"""
