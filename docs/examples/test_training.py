"""Tests of a training, as in your own project: ``pytest docs/examples/test_training.py``."""

from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.links import Linear

import chainermn
from chainermn.agreement import run_together
from chainermn.testing.mpiexec import run_job

HERE = Path(__file__).parent


def loss(model, x):
    return F.mean(F.sigmoid(model(x)) ** 2)


@pytest.mark.mpi(1, 2, 3)
def test_a_step_of_all_ranks_is_the_step_of_one_process():
    comm = chainermn.create_communicator()
    batch = np.random.default_rng(0).normal(size=(12, 5))

    model = Linear(5, 2, nobias=True, initialW=np.ones((2, 5)))
    optimizer = chainer.optimizers.SGD(lr=0.1)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)
    mine = batch[comm.rank :: comm.size]
    optimizer.update(loss, model, mine)  # makes the ranks equal, takes no step
    optimizer.update(loss, model, mine)

    alone = Linear(5, 2, nobias=True, initialW=np.ones((2, 5)))
    chainer.optimizers.SGD(lr=0.1).setup(alone).update(loss, alone, batch)
    np.testing.assert_allclose(model.W.array, alone.W.array, rtol=1e-12)


@pytest.mark.mpi(2)
def test_all_ranks_raise_if_one_cannot_read_its_file(shared_tmp_path):
    comm = chainermn.create_communicator()
    if comm.rank == 0:
        (shared_tmp_path / "0.txt").write_text("1 2 3")
    path = shared_tmp_path / f"{comm.rank}.txt"
    with pytest.raises((OSError, RuntimeError), match=r"1\.txt"):
        run_together(comm, "reading", path.read_text)


def draw():
    comm = chainermn.create_communicator()
    np.random.seed(comm.rank)
    return np.random.rand()


def test_every_rank_draws_another_number():
    assert len(set(chainermn.launch.run(draw, ranks=2))) == 2


def test_the_whole_script_trains_and_leaves_weights(tmp_path):
    run_job(2, [HERE / "like_ddp.py"], cwd=tmp_path).check()
    assert (tmp_path / "model.npz").exists()
