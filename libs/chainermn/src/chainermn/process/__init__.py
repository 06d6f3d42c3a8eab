"""Set up a rank's process: its share of the cores, and how it keeps freed memory."""

#: Setting any of these variables turns the limit on threads off.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
