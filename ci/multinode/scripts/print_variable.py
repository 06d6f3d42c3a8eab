"""Print, for every rank, its host and the value of a variable: ``python print_variable.py NAME``.

On rank 0, as JSON.
"""

import json
import os
import socket
import sys

from mpi4py import MPI

everywhere = MPI.COMM_WORLD.gather([socket.gethostname(), os.environ.get(sys.argv[1])])
if everywhere is not None:
    print(json.dumps(everywhere))
