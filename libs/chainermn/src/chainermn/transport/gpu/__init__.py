"""Collectives on arrays in GPU memory, over NCCL and over MPI."""
