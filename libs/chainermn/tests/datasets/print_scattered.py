"""Print what every rank gets from whichever `chainermn` is imported."""

import json
import sys
import warnings

import numpy as np
from chainer.datasets import SubDataset, TupleDataset

warnings.simplefilter("ignore")


def main() -> None:
    import chainermn

    comm = chainermn.create_communicator("naive")
    is_ours = not chainermn.__version__.startswith("7.")
    results = []
    for n in (0, 1, 2, 3, 10, 31):
        for shuffle in (False, True):
            for equal in (False, True):
                for dataset in (
                    list(range(n)),
                    np.arange(n),
                    TupleDataset(np.arange(n), np.arange(n) * 2),
                    SubDataset(np.arange(n + 2), 1, n + 1),
                ):
                    part = chainermn.scatter_dataset(
                        dataset if comm.rank == 0 else None,
                        comm,
                        shuffle=shuffle,
                        seed=n + 1,
                        force_equal_length=equal,
                    )
                    results.append(np.array(part[:]).tolist())
        results.append(chainermn.scatter_index(n, comm))
    by_rank = comm.gather_obj(results)
    if comm.rank == 0:
        print(json.dumps({"is_ours": is_ours, "by_rank": by_rank}))


if __name__ == "__main__":
    sys.exit(main())
