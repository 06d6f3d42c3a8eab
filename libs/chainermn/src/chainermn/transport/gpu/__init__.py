"""Collectives on arrays in GPU memory: by NCCL, and by MPI."""
