"""Start jobs: the options and variables that each ``mpiexec`` needs, and ``chainermn launch``."""
