"""A rank's process and others: cores, memory, ``/proc``, and helpers that outlive a rank."""

#: Setting any of these variables turns the limit on threads off.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
