"""A training script in which rank 1 fails in a given way while rank 0 waits.

Usage: ``fail.py HOW [RANK]``. With RANK, that rank fails instead of rank 1.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import chainer
import numpy as np


def launched_rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


class Slow:
    """A data set that is slow to read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5)
        return os.getpid()


def kill_worker() -> None:
    multiprocessing.set_start_method("forkserver")
    batches = chainer.iterators.MultiprocessIterator(Slow(), 2, n_processes=2, shared_mem=0)
    os.kill(next(batches)[0], signal.SIGKILL)
    print("failing", flush=True)
    for _ in batches:
        pass


def take_memory() -> None:
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = n_pages * resource.getpagesize() + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print("failing", flush=True)
    taken = []
    while True:
        taken.append(np.ones(1 << 20))


def write_checkpoint(comm, is_full: bool) -> None:
    import chainermn

    with tempfile.TemporaryDirectory() as folder:
        checkpointer = chainermn.create_multi_node_checkpointer("name", comm, path=folder)
        checkpointer.save(chainer.links.Linear(100, 100), 1)
        if is_full:
            sys.dont_write_bytecode = True  # Python 3.11 would keep truncated bytecode files
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
            print("failing", flush=True)
        checkpointer.save(chainer.links.Linear(100, 100), 2)


def evaluate(comm, is_added: bool) -> None:
    import chainermn

    data = chainer.datasets.TupleDataset(np.zeros((4, 1), np.float32), np.zeros(4, np.int32))
    model = chainer.links.Classifier(chainer.links.Linear(1, 2))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    batches = (chainer.iterators.SerialIterator(data, 2, repeat=each) for each in (True, False))
    updater = chainer.training.StandardUpdater(next(batches), optimizer)
    trainer = chainer.training.Trainer(updater, (2, "epoch"))
    evaluator = chainer.training.extensions.Evaluator(next(batches), model)
    if is_added:
        trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.run()


def fail(how: str, comm) -> None:
    if how == "worker killed":
        kill_worker()
    if how == "out of memory":
        take_memory()
    print("failing", flush=True)
    if how == "exception":
        raise RuntimeError("by design")
    if how.startswith("sys.exit"):
        sys.exit(int(how[-1]))
    if how == "os._exit 0":
        os._exit(0)
    if how == "segmentation fault":
        ctypes.string_at(0)
    if how in ("recv", "recv on both"):
        comm.recv_obj(1 - comm.rank)
    if how == "compute":
        time.sleep(25)
    if how == "link goes down":
        time.sleep(60)
    if how in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, how))


def main(how: str, who: str = "1") -> None:
    # Python ignores interrupts if its parent does, as in a shell's background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if how == "early exit" and launched_rank() == int(who):
        sys.exit(0)
    import chainermn

    comm = chainermn.create_communicator("naive")
    comm.allreduce(np.ones(3))
    if comm.rank == int(who):  # otherwise the lines of two ranks may mix
        maps = Path("/proc/self/maps").read_text().split()
        shared = {word for word in maps if "/mpich_shm_" in word or "/sm_segment." in word}
        print(*shared, flush=True)
    if how == "regular":
        if comm.rank == 0:
            comm.send_obj("the last message", 1)
            time.sleep(0.5)
        else:
            comm.recv_obj(0)
        sys.exit(7)
    if how == "all raise":
        raise RuntimeError("by design")
    if how == "disk full":
        write_checkpoint(comm, is_full=comm.rank == int(who))
    if how == "extension":
        evaluate(comm, is_added=comm.rank == int(who))
        return
    if how.endswith("to mpiexec"):
        if comm.rank == int(who):
            print("failing", flush=True)
        comm.recv_obj(1 - comm.rank)
    if comm.rank == int(who):
        fail(how, comm)
    elif how == "recv on both":
        comm.recv_obj(1 - comm.rank)
    comm.allreduce(np.ones(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
