"""What the examples of docs/model_parallel compute on ranks equals what one process computes."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pages
import pytest
from loading import load
from on_ranks import EXAMPLES, LIMIT, lines_of_ranks, run_on_ranks

import chainermn

pytestmark = pytest.mark.timeout(4 * LIMIT)


@pytest.fixture
def comm():
    return chainermn.create_communicator()


@pytest.fixture(autouse=True)
def in_float64():
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        yield


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def assert_equal(own, expected):
    """Compare the parameters of two links, or their gradients."""
    for (name, one), (_, other) in zip(
        sorted(own.namedparams()), sorted(expected.namedparams()), strict=True
    ):
        np.testing.assert_allclose(one.array, other.array, rtol=1e-12, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.mpi(2)
def test_two_halves(comm):
    x, t = numbers(6, 4), np.array([0, 1, 0, 0, 1, 1], np.int32)
    whole = chainer.Sequential(L.Linear(4, 3), F.tanh, L.Linear(3, 2))
    own = whole[2 * comm.rank].copy("copy")
    losses = load(EXAMPLES / "two_halves.py").train(comm, own, x, t)

    optimizer, expected = chainer.optimizers.SGD(lr=0.5).setup(whole), []
    for _ in losses or range(5):
        loss = F.softmax_cross_entropy(whole(x), t)
        whole.cleargrads()
        loss.backward()
        optimizer.update()
        expected.append(loss.item())
    assert_equal(own, whole[2 * comm.rank])
    if comm.rank == 1:
        assert losses == pytest.approx(expected, rel=1e-12)


def test_chain_list(tmp_path):
    lines = lines_of_ranks(2, EXAMPLES / "chain_list.py", cwd=tmp_path)
    assert lines == ["as in one process: True"]


# What backward does wrong is on the page, with what ChainerMN says.


def failing(mistake, cwd):
    """Run a mistake that ends the job; return its message, and what the ranks print."""
    job, lines = run_on_ranks(2, EXAMPLES / "backward_mistakes.py", mistake, cwd=cwd)
    assert job.returncode != 0
    return job.stderr, lines


def test_reply_without_a_delegate(tmp_path):
    message, lines = failing("no_delegate", tmp_path)
    assert lines == ["step 1: gradient None"]
    (on_page,) = (
        b for b in pages.marked("said by chainermn") if "RuntimeError: rank 0 waits" in b.text
    )
    assert on_page.text in message


def test_loss_that_is_not_tied(tmp_path):
    lines = lines_of_ranks(2, EXAMPLES / "backward_mistakes.py", "not_tied", cwd=tmp_path)
    assert lines == ["gradient [1. 1. 1.]"]


def test_backward_in_a_circle(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", "6")
    message, _ = failing("too_early", tmp_path)
    assert "these ranks wait for each other" in message
    assert message.count("in too_early") == 2


def test_no_backward_on_the_other_rank(tmp_path):
    message, _ = failing("no_backward", tmp_path)
    assert "rank 1 on" in message and "has ended its script" in message
