"""Start jobs: what each ``mpiexec`` has to be told, and ``chainermn launch``."""
