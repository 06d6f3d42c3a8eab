"""Collectives on arrays in host memory, by MPI and, inside a host, through shared memory."""
