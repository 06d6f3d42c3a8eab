"""Sleep on every rank or, with the argument ``stray``, leave a process of the last rank behind."""

import subprocess
import sys
import time

from mpi4py import MPI

comm = MPI.COMM_WORLD
if sys.argv[1:] == ["stray"]:
    if comm.rank == comm.size - 1:
        # If it kept the rank's output open, mpiexec would wait for it.
        void = subprocess.DEVNULL
        command = ["sleep", "86400"]
        subprocess.Popen(command, stdin=void, stdout=void, stderr=void, start_new_session=True)
else:
    comm.barrier()
    if comm.rank == 0:
        print("all ranks sleep", flush=True)
    time.sleep(86400)
