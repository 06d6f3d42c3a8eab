"""Collectives on arrays in host memory: by MPI, and by shared memory inside a host."""
