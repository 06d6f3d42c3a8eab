"""Print how many bytes each rank's memory grows by while a 160 MB data set is scattered."""

import json
import resource
import sys

import numpy as np
from chainer.datasets import TupleDataset


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    import chainermn

    comm = chainermn.create_communicator("naive")
    # Do not count what the first messages allocate.
    chainermn.scatter_dataset(np.zeros((1000, 1000), "f"), comm)
    n = 40000
    whole = None
    if comm.rank == 0:
        whole = TupleDataset(np.ones((n, 1000), "f"), np.arange(n, dtype="i"))
    comm.allgather_obj(None)
    peak_before = peak()
    part = chainermn.scatter_dataset(whole, comm, shuffle=True, seed=0)
    assert len(part) == n // comm.size
    peaks = comm.gather_obj(peak() - peak_before)
    if comm.rank == 0:
        print(json.dumps({"data": n * 4004, "peak": peaks}))


if __name__ == "__main__":
    sys.exit(main())
