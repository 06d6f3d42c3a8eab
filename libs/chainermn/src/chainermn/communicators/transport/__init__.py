"""How bytes travel: a few collectives on one flat array, over MPI or over NCCL.

The only modules that touch ``mpi4py.MPI`` or NCCL, and they do so when a communicator is
created, never when they are imported.
"""
