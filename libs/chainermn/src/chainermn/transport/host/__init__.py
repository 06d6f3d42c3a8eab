"""Collectives on arrays in host memory, over MPI, and through shared memory inside a host."""
