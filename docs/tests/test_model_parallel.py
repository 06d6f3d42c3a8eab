"""The examples of docs/model_parallel compute the same on ranks as in one process."""

import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pages
import pytest
from loading import load
from on_ranks import EXAMPLES, LIMIT, lines_of_job, run_on_ranks

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


X = np.random.default_rng(0).normal(size=(6, 4))
T = np.array([0, 1, 0, 0, 1, 1], np.int32)


def trained_alone(forward, *links):
    """Train links in this process; return the losses."""
    optimizer, losses = chainer.optimizers.SGD(lr=0.5).setup(chainer.ChainList(*links)), []
    for _ in range(5):
        loss = F.softmax_cross_entropy(forward(X), T)
        optimizer.target.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(loss.item())
    return pytest.approx(losses, rel=1e-12)


def assert_equal(own, expected):
    """Compare the parameters of two links, and their gradients."""
    for one, other in zip(own.params(), expected.params(), strict=True):
        np.testing.assert_allclose(one.array, other.array, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.mpi(2)
def test_two_halves(comm):
    links = L.Linear(4, 3), L.Linear(3, 2)
    own = links[comm.rank].copy("copy")
    losses = load(EXAMPLES / "two_halves.py").train(comm, own, X, T)

    expected = trained_alone(lambda x: links[1](F.tanh(links[0](x))), *links)
    assert losses == (expected if comm.rank == 1 else [])
    assert_equal(own, links[comm.rank])


@pytest.mark.mpi(2)
def test_links_in_a_row(comm):
    example = load(EXAMPLES / "chain_list.py")
    links = example.layer(4, 3), example.layer(3, 3), L.Linear(3, 2)
    model = example.in_a_row(comm, *(link.copy("copy") for link in links))
    losses = example.train(comm, model, X, T)

    expected = trained_alone(chainer.Sequential(*links), *links)
    assert losses == (expected if comm.rank == 0 else [])
    assert_equal(model, chainer.ChainList(*(links[::2] if comm.rank == 0 else links[1:2])))


@pytest.mark.mpi(3)
def test_branches(comm):
    example = load(EXAMPLES / "chain_list.py")
    links = first, one, other, join = (
        *(example.layer(4, width) for width in (4, 3, 3)),
        example.Join(),
    )
    copies = [link.copy("copy") for link in links]
    model = example.with_branches(comm, copies[0], copies[1:3], copies[3])
    losses = example.train(comm, model, X, T)

    def forward(x):
        h = first(x)
        return join(one(h), other(h))

    expected = trained_alone(forward, *links)
    assert losses == (expected if comm.rank == 0 else [])
    assert_equal(model, chainer.ChainList(*([first, join], [one], [other])[comm.rank]))


@pytest.mark.mpi(1, 3)
@pytest.mark.parametrize("kind", ["Full", "Truncated"])
def test_recurrent_network(comm, kind):
    example = load(EXAMPLES / "rnn.py")
    xs, ts = example.sequences(seed=0)
    xs = xs.astype(np.float64)
    parts = np.split(np.arange(xs.shape[1]), comm.size)
    model = getattr(example, kind)(comm)
    lstm = model.rnn if kind == "Truncated" else model.rnn.actual_rnn
    alone = chainer.ChainList(lstm.copy("copy"), model.out.copy("copy"))
    own = parts[comm.rank]
    loss = model(list(xs[:, own]), list(ts[:, own]))
    model.cleargrads()
    loss.backward()
    comm.multi_node_mean_grad(model)

    states, losses = (None, None), []
    for part in parts:
        if kind == "Truncated" and losses:
            states = [state.array for state in states]
        *states, ys = alone[0](*states, list(xs[:, part]))
        y, t = alone[1](F.concat(ys, axis=0)), ts[:, part].ravel()
        losses.append(F.softmax_cross_entropy(y, t))
    alone.cleargrads()
    (sum(losses) / comm.size).backward()
    assert loss.item() == pytest.approx(losses[comm.rank].item(), rel=1e-12)
    assert_equal(chainer.ChainList(lstm, model.out), alone)


@pytest.mark.mpi(3)
@pytest.mark.parametrize("kind", ["synchronized", "shared"])
def test_inputs_belong_to_labels(comm, kind):
    np.random.seed(comm.rank)
    inputs = np.arange(150)
    iterator = getattr(load(EXAMPLES / "inputs.py"), kind)(comm, inputs, -inputs)
    orders = []
    for step in range(6):  # two epochs
        batch = chainer.dataset.concat_examples(next(iterator))
        assert iterator.epoch == (step + 1) // 3
        x, middle, t = comm.allgather_obj(batch)
        if kind == "shared":
            assert np.array_equal(x, middle) and np.array_equal(x, t)
            x, t = x
        else:
            assert middle == ()
        assert np.array_equal(x, -t)
        orders.append(x)
    epochs = np.array(orders).reshape(2, 150)
    assert not np.array_equal(*epochs)
    assert all(np.array_equal(np.sort(epoch), inputs) for epoch in epochs)


@pytest.mark.mpi(1, 3)
def test_ensemble(comm):
    """Check the gradients of the mean's loss, and how much an ensemble gains."""
    example = load(EXAMPLES / "ensemble.py")
    x, y = (array.astype(np.float64) for array in example.curve(9, noise=0.1, seed=2))
    members = [
        chainer.Sequential(L.Linear(1, 5), F.tanh, L.Linear(5, 1)) for _ in range(comm.size)
    ]
    model = members[comm.rank].copy("copy")
    model.cleargrads()
    example.together(comm, model, x, y).backward()

    everyone = chainer.ChainList(*members)
    predictions = [member(x) for member in members]
    loss = F.mean_squared_error(sum(predictions) / comm.size, y)
    everyone.cleargrads()
    loss.backward()
    assert_equal(model, members[comm.rank])

    mean = example.ensemble(comm, model, x).array
    errors = [np.mean((one.array - y) ** 2) for one in predictions]
    spread = [np.mean((one.array - mean) ** 2) for one in predictions]
    assert loss.item() == pytest.approx(np.mean(errors) - np.mean(spread), rel=1e-12)


def test_ensemble_is_better_than_each_of_its_models():
    """Read this from its page, which `test_block_on_3_ranks` compares with the output."""
    alone, _ = (b for b in pages.marked("run: mpiexec") if b.page.stem == "ensemble")
    each, mean = (line.partition(": ")[2].split() for line in pages.printed_by(alone))
    assert float(mean[0]) < 0.9 * min(map(float, each))


@pytest.mark.mpi(4)
def test_replicas_of_two_halves(comm):
    links = L.Linear(4, 3), L.Linear(3, 2)
    replica = comm.split(comm.rank // 2, comm.rank)
    peers = comm.split(comm.rank % 2, comm.rank)
    own = links[replica.rank].copy("copy")
    losses = load(EXAMPLES / "both.py").train(replica, peers, own, X, T)

    expected = trained_alone(lambda x: links[1](F.tanh(links[0](x))), *links)
    assert_equal(own, links[replica.rank])
    if replica.rank == 1:
        first, *means = np.mean(peers.allgather_obj(losses), axis=0)
        assert first == means[0] and means == expected


@pytest.mark.mpi(1)
@pytest.mark.parametrize("name", ["two_halves", "delegates", "chain_list", "inputs", "both"])
def test_too_few_ranks(name):
    with pytest.raises(ValueError, match=r"expected .*ranks, got 1$"):
        load(EXAMPLES / f"{name}.py").main()


# The page shows these mistakes with backward, and ChainerMN's messages.


def failing(mistake, cwd):
    """Run a mistake that ends the job; return its message and what the ranks print."""
    job, lines = run_on_ranks(2, EXAMPLES / "backward_mistakes.py", mistake, cwd=cwd)
    assert job.returncode != 0
    return job.stderr, lines


def messages_on_page():
    marked = pages.marked("said by chainermn")
    return [block.text for block in marked if block.page.stem == "pseudo_connect"]


def test_reply_without_a_delegate(tmp_path):
    message, lines = failing("no_delegate", tmp_path)
    assert lines == ["step 1: gradient None"]
    on_page, _ = messages_on_page()
    assert on_page in message


def test_loss_that_is_not_tied(tmp_path):
    """This needs a job of its own: a gradient is left on its way to rank 0."""
    lines = lines_of_job(2, EXAMPLES / "backward_mistakes.py", "not_tied", cwd=tmp_path)
    assert lines == ["gradient [1. 1. 1.]"]


def test_backward_in_a_circle(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINERMN_STALL_LIMIT", "3")
    message, _ = failing("too_early", tmp_path)
    _, on_page = messages_on_page()
    places = re.findall(r"backward_mistakes.py:\d+ in too_early", on_page)
    assert "these ranks wait for each other" in message and len(places) == 2
    assert [place for place in places if place not in message] == []


def test_no_backward_on_the_other_rank(tmp_path):
    message, _ = failing("no_backward", tmp_path)
    assert "rank 1 on" in message and "has ended its script" in message
