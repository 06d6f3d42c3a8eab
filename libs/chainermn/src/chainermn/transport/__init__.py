"""How bytes travel: a few collectives on one flat array, over MPI, shared memory or NCCL.

Knows nothing of Chainer. ``mpi4py.MPI`` and NCCL are loaded when a communicator is created, never
when a module of this folder is imported.
"""
