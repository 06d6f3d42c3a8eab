"""Read batches with worker processes, under MPI."""

import numpy as np

import chainermn


def main() -> None:
    chainermn.iterators.start_forkserver()
    comm = chainermn.create_communicator()
    numbers = np.arange(12) if comm.rank == 0 else None
    part = chainermn.scatter_dataset(numbers, comm)
    batches = chainermn.iterators.MultiprocessIterator(
        part, batch_size=3, n_processes=1, repeat=False, shuffle=False
    )
    print([[int(number) for number in batch] for batch in batches])
    batches.finalize()


if __name__ == "__main__":
    main()
