"""Snapshots and checkpoints from strangers: all ranks refuse them, and none runs their code."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import create_multi_node_checkpointer, multi_node_snapshot
from libs.chainermn.tests.extensions import strange_files, training

HERE = Path(__file__).parent
KEY = "updater/iteration"
REFUSAL = (
    rf"'{KEY}' in .*{{file}} is a pickle of more than None, numbers and strings: it has a call of "
    r"posix\.mkdir\. Loading it could run any program\. If you trust whoever made the file, "
    "CHAINER_COMPAT_TRUST_FILES=1 reads it"
)


@pytest.mark.parametrize("number", [98, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_mutants_are_loaded_or_refused_in_little_memory(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", HERE / "read_strange_files.py", tmp_path]
    job = subprocess.run([*command, "0", str(number)], capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    print(job.stdout)
    became = found["became"]
    assert sum(sum(counts.values()) for counts in became.values()) == number
    assert became["booby_trapped"]["unsafe"] > 5
    for harmless in ("with_flipped_bits", "with_members_swapped", "with_another_array"):
        assert became[harmless]["loaded"] > 0, harmless
    assert found["megabytes"] < 64
    size, why = found["bomb"]
    assert size < 4 * 2**20
    assert "damaged: Unable to allocate 256. MiB" in why


def write(comm: Any, out: Path, settings: Any = None, **snapshot: Any) -> Any:
    """Return a trainer for two iterations and the extension that writes its snapshots."""
    trainer = training.make_trainer(comm, out, 2)
    shared = multi_node_snapshot(comm, extensions.snapshot(**snapshot), [], settings=settings)
    trainer.extend(shared, trigger=(1, "iteration"))
    return trainer, shared


def change(comm: Any, path: Path, change: Any) -> None:
    if comm.rank == 0:
        path.write_bytes(change(path.read_bytes()))
    comm.allgather_obj(None)


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("way", ["by its path", "the newest", "by itself"])
def test_trapped_snapshot(comm: Any, way: str, shared_tmp_path: Path) -> None:
    settings = None if way == "by itself" else {"lr": 0.1}
    trainer, _ = write(comm, shared_tmp_path, settings)
    trainer.run()
    comm.allgather_obj(None)
    trap = shared_tmp_path / "trapped"
    file = shared_tmp_path / "snapshot_iter_2.0"
    change(comm, file, lambda content: strange_files.with_trap(content, KEY, trap))
    again, shared = write(comm, shared_tmp_path, settings, autoload=way == "by itself")
    # An older one has no trap, and would be loaded if this one were only damaged.
    with pytest.raises((OSError, RuntimeError), match=REFUSAL.format(file=file.name)):
        if way == "by itself":
            shared.initialize(again)
        else:
            shared.resume(again, file if way == "by its path" else None)
    assert again.updater.iteration == 0
    assert not trap.exists()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("readers", [3, 2])
def test_trapped_checkpoint(readers: int, shared_tmp_path: Path) -> None:
    world = chainermn.create_communicator("naive")
    trainer = training.make_trainer(world, shared_tmp_path, 2)
    checkpointer = create_multi_node_checkpointer("job", world)
    checkpointer.finalize = lambda: None
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    trainer.run()
    world.allgather_obj(None)
    trap = shared_tmp_path / "trapped"
    file = shared_tmp_path / "job.2.2"
    change(world, file, lambda content: strange_files.with_trap(content, KEY, trap))
    comm = world.split(0 if world.rank < readers else 1, world.rank)
    if world.rank < readers:
        again = training.make_trainer(comm, shared_tmp_path, 2)
        with pytest.raises((OSError, RuntimeError), match=REFUSAL.format(file=file.name)):
            create_multi_node_checkpointer("job", comm).maybe_load(again)
    assert not trap.exists()
    world.allgather_obj(None)


@pytest.mark.mpi(2)
def test_checkpoint_of_more_ranks_than_there_are_files(comm: Any, shared_tmp_path: Path) -> None:
    checkpointer = create_multi_node_checkpointer("x", comm, path=shared_tmp_path)
    checkpointer.save(chainer.links.Bias(0, ()), 1)
    path = shared_tmp_path / "x.1.1"

    def claim(content: bytes) -> bytes:
        parts = strange_files.members(content)
        label = strange_files.npy(np.array([10**15, 1, 1, 5]))
        return strange_files.packed(parts | {"chainermn_checkpoint.npy": label})

    change(comm, path, claim)
    link = chainer.links.Bias(0, ())
    link.b.array[...] = 5
    skips = pytest.warns(
        UserWarning, match="the other files of 1000000000000000 ranks are missing"
    )
    with skips if comm.rank == 1 else contextlib.nullcontext():
        checkpointer.maybe_load(link)
    assert link.b.array == 5


@pytest.mark.mpi(3)
def test_mutants_are_refused_by_all_ranks_or_by_none(comm: Any, shared_tmp_path: Path) -> None:
    first, _ = write(comm, shared_tmp_path, {"lr": 0.1})
    first.run()
    comm.allgather_obj(None)
    path, trap = shared_tmp_path / "snapshot_iter_2.0", shared_tmp_path / "trapped"
    original, mutant = path.read_bytes(), shared_tmp_path / "mutant.0"
    comm.allgather_obj(None)
    refused = []
    for seed, mutate in enumerate(strange_files.MUTATIONS * 2):
        if comm.rank == 0:
            mutant.write_bytes(mutate(random.Random(seed), original, trap))
        comm.allgather_obj(None)
        trainer, shared = write(comm, shared_tmp_path, {"lr": 0.1})
        try:
            shared.resume(trainer, mutant)
        except (OSError, RuntimeError, ValueError) as error:
            assert "mutant.0" in str(error)
            refused.append(seed)
    everywhere = comm.allgather_obj(refused)
    assert everywhere == [refused] * comm.size
    assert len(refused) > len(strange_files.MUTATIONS)
    assert not trap.exists()
