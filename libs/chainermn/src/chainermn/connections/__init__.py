"""Who may join a job, and how messages travel: over TCP, because MPI may be stuck."""
