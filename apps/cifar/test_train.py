"""Train on a few ranks and check what comes out."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.optimizer_hooks import WeightDecay
from chainer.training import StandardUpdater
from PIL import Image

import chainermn
from chainermn.testing.mpiexec import run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
ACCURACY = "validation/main/accuracy"
TINY = ["--examples", "60", "--unit", "4", "--epoch", "5", "--batchsize", "3", "--lr", "1"]


@pytest.fixture(scope="module")
def trained(app, call, folder) -> tuple[str, Path]:
    """Train on all ranks; return what this rank prints, and the folder."""
    out = folder / "result"
    return call(app.train.main, *TINY, "--out", out), out


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_what_is_written(trained, read_log):
    _, out = trained
    plots = ["accuracy.png", "examples.png", "loss.png", "ranks.png"]
    snapshots = [f"snapshot_iter_{9 * epoch}.0" for epoch in (3, 4, 5)]
    others = ["best.json", "best.npz", "log", "model.npz", "run.json"]
    assert sorted(path.name for path in out.glob("[!.]*")) == sorted([*others, *plots, *snapshots])
    for name in plots:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    log = read_log(out)
    assert [row["epoch"] for row in log] == [1, 2, 3, 4, 5]
    assert all(row["images/s"] > 0 for row in log)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_learning_rate_rises_and_falls(trained, read_log):
    peak = 1 * 3 * 2 / 100
    done = [(epoch - 1 / 9) / 5 for epoch in range(1, 6)]  # before the last step of an epoch
    falling = [(1 + np.cos(np.pi * (share - 0.2) / 0.8)) / 2 for share in done[1:]]
    expected = peak * np.array([0.1 + 0.9 * done[0] / 0.2, *falling])
    np.testing.assert_allclose([row["lr"] for row in read_log(trained[1])], expected, rtol=1e-9)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_test_images_are_those_of_the_best_network(trained, app, call, tmp_path, capsys):
    shown, out = trained
    again = call(app.train.main, *TINY, "--evaluate", "--out", out)
    if chainermn.create_communicator("naive").rank > 0:
        assert shown == again == ""
        return
    first, title, *_, best, _, tested = shown.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert title.split() == ["class", "train", "validate", "test"]
    about = json.loads((out / "best.json").read_text())
    assert best == f"the best: {about['value']:.2%} after epoch {about['epoch']}"
    accuracy = re.fullmatch(r"([\d.]+)% of the 100 test images recognized by the best", tested)[1]
    assert again.splitlines()[-1] == tested

    predicted = call(app.predict.main, out / "best.npz", "--picture", tmp_path / "seen.png")
    assert predicted.startswith(f"{accuracy}% of 100 test images recognized\n")
    pairs = re.findall(r"^  (\w+) taken for (\w+): \d+ times?$", predicted, re.MULTILINE)
    assert {name for pair in pairs for name in pair} <= set(app.shapes.CLASSES)
    assert pairs
    assert (tmp_path / "seen.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert capsys.readouterr().err == ""


@pytest.mark.mpi(3, timeout=LIMIT)
def test_evaluation_on_ranks_that_do_not_divide_the_images(app, call, shared_tmp_path):
    comm = chainermn.create_communicator("naive")
    np.random.seed(1)
    network = app.model.ResNet(4, 10, 0)
    if comm.rank == 0:
        chainer.serializers.save_npz(shared_tmp_path / "best.npz", network)
    comm.mpi_comm.Barrier()
    shown = call(app.train.main, *TINY, "--evaluate", "--out", shared_tmp_path)
    test = app.data.load("shapes", examples=60).test
    chances = app.predict.predict(network, app.data.normalized(test))
    right = int((chances.argmax(axis=1) == np.array([label for _, label in test])).sum())
    if comm.rank == 0:
        last = f"{right / 100:.2%} of the 100 test images recognized by the best"
        assert shown.splitlines()[-1] == last


@pytest.mark.mpi(2, timeout=LIMIT)
def test_quiet_training_prints_nothing(app, call_quietly, shared_tmp_path):
    call_quietly(app.train.main, *TINY, "--epoch", 1, "--out", shared_tmp_path)


@pytest.mark.mpi(1, timeout=LIMIT)
def test_mixed_precision(app):
    args = SimpleNamespace(unit=4, dropout=0, lr=1, weight_decay=0.01, batchsize=4, seed=3)
    vars(args).update(epoch=1, no_augment=False, graphs=False, mixed16=True, out="unused")
    comm, images = chainermn.create_communicator("naive"), app.data.load("shapes", examples=50)
    chainer.global_config.dtype = chainer.mixed16
    trainer, network = app.training.create_trainer(
        args, comm, chainer.get_device("@numpy"), images
    )
    before = network.conv.W.array.copy()
    for _ in range(2):  # the first one only distributes parameters
        trainer.updater.update()
    assert network.conv.W.dtype == np.float16
    assert network.conv.W.update_rule.state["v"].dtype == np.float32
    assert (network.conv.W.array != before).any()


class Lost(Exception):
    """Something that ends a training in the middle."""


@pytest.mark.mpi(2, timeout=LIMIT)
def test_run_that_is_started_again_ends_as_one_never_interrupted(
    trained, app, call, read_log, shared_tmp_path, monkeypatch
):
    whole, out = trained[1], shared_tmp_path / "result"
    update = StandardUpdater.update

    def update_or_fail(updater: StandardUpdater) -> None:
        update(updater)
        if updater.iteration == 29:
            raise Lost

    with monkeypatch.context() as patch:
        patch.setattr(StandardUpdater, "update", update_or_fail)
        with pytest.raises(Lost):
            call(app.train.main, *TINY, "--out", out)
    assert [row["iteration"] for row in read_log(out)] == [9, 18, 27]
    shown = call(app.train.main, *TINY, "--out", out)
    said = f"resuming after iteration 27, epoch 3, from {out}/snapshot_iter_27.0"
    assert (said in shown) == (chainermn.create_communicator("naive").rank == 0)
    for row, straight in zip(read_log(out), read_log(whole), strict=True):
        for key in ("iteration", "main/loss", ACCURACY, "lr"):
            assert row[key] == straight[key]
    for name in ("model.npz", "best.npz"):
        with np.load(out / name) as first, np.load(whole / name) as second:
            assert sorted(first) == sorted(second)
            for key in first:
                np.testing.assert_array_equal(first[key], second[key], err_msg=key)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_weights_that_do_not_fit_are_refused(trained, app, tmp_path, capsys):
    path = trained[1] / "best.npz"
    with pytest.raises(ValueError, match=r"best.npz has the weights of another network"):
        app.model.load_weights(path.read_bytes(), path, app.model.ResNet(8, 10, 0))
    with pytest.raises(OSError, match=r"best.npz is damaged"):
        app.model.load_weights(path.read_bytes()[:-500], path, app.model.ResNet(4, 10, 0))
    set_traps(path, tmp_path / "best.npz", tmp_path / "trapped")
    shutil.copy(trained[1] / "run.json", tmp_path)
    with pytest.raises(SystemExit, match=r"^error: .* in .*best\.npz is a pickle of more than"):
        app.predict.main([str(tmp_path / "best.npz")])
    assert not (tmp_path / "trapped").exists()


@pytest.mark.mpi(2, timeout=LIMIT)
def test_input_that_is_wrong_ends_all_ranks_with_one_line(
    trained, app, refused, shared_tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(shared_tmp_path)
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        Path("strange").mkdir()
        set_traps(next(trained[1].glob("snapshot_*.0")), "snapshot.0", "trapped")
        set_traps(trained[1] / "best.npz", "strange/best.npz", "trapped")
        os.mkfifo("pipe")
    comm.mpi_comm.Barrier()
    for options, message in [
        (["--dataset", "cifar10", "--data", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--dataset", "cifar10", "--data", "pipe"], "pipe: expected a regular file, got a pipe"),
        (["--evaluate"], "there is no trained network result/best.npz: train first"),
        (["--evaluate", "--out", "strange"], "in strange/best.npz is a pickle of more than None"),
        (["--resume", "snapshot.0"], "in snapshot.0 is a pickle of more than None, numbers and"),
    ]:
        shown = refused(app.train.main, *TINY, *options)
        assert message in shown
        assert "\n" not in shown
    assert not Path("trapped").exists()
    for options, message in [
        (["--batchsize", "0"], "--batchsize must be at least 1, got 0"),
        (["--graphs"], "--graphs needs --gpu"),
        (["--channels-last", "--gpu"], "needs --mixed16, CHAINER_COMPAT_CUDNN=1"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            app.train.main(options)
        assert message in capsys.readouterr().err


@pytest.mark.mpi(2, timeout=LIMIT)
def test_other_classes_and_other_images_are_noticed(app, call, refused, shared_tmp_path, capsys):
    comm = chainermn.create_communicator("naive")
    source, out = shared_tmp_path / "source", shared_tmp_path / "result"
    random = np.random.RandomState(0)
    options = ["--unit", 4, "--epoch", 1, "--batchsize", 3, "--out", out]
    options += ["--dataset", "cifar10", "--data", source]
    if comm.rank == 0:
        for name in ("blue", "green", "red\udcff"):
            for path in (source / "test" / name, source / "train" / name):
                path.mkdir(parents=True)
                for i in range(4):
                    pixels = random.randint(0, 256, (32, 32, 3)).astype(np.uint8)
                    Image.fromarray(pixels).save(path / f"{i}.png")
    comm.mpi_comm.Barrier()
    call(app.train.main, *options)
    call(app.train.main, *options, "--evaluate")
    call(app.predict.main, out / "best.npz", "--picture", out / "seen.png")
    capsys.readouterr()

    comm.mpi_comm.Barrier()
    if comm.rank == 0:
        path.joinpath("0.png").write_bytes(path.joinpath("1.png").read_bytes())
    comm.mpi_comm.Barrier()
    call(app.train.main, *options, "--evaluate")
    assert "other settings (images: '" in refused(app.train.main, *options)

    if comm.rank == 0:
        for part in ("test", "train"):
            (source / part / "blue").rename(source / part / "zblue")
    comm.mpi_comm.Barrier()
    then, now = ["blue", "green", "red\udcff"], ["green", "red\udcff", "zblue"]
    wrong = f"trained with the classes {then!a}, but --data has {now!a}"
    assert wrong in refused(app.train.main, *options, "--evaluate")
    assert f"(classes: {then!r}, now {now!r};" in refused(app.train.main, *options)
    with pytest.raises(SystemExit, match=re.escape(wrong)):
        app.predict.main([str(out / "best.npz")])


def test_predicting_says_what_is_missing(tmp_path, app):
    weights = [str(tmp_path / "best.npz")]
    with pytest.raises(SystemExit, match=r"^error: .* network .*best\.npz: train first"):
        app.predict.main(weights)
    (tmp_path / "best.npz").touch()
    with pytest.raises(SystemExit, match=r"no .*run.json: train.py writes it beside the"):
        app.predict.main(weights)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SystemExit, match=r"run\.json: not JSON"):
        app.predict.main(weights)
    right = {"dataset": "shapes", "data": None, "examples": None, "unit": 8, "dropout": 0.1}
    for change, message in [
        ({"unit": 10**12}, "'unit': expected an integer from 1 to 1024, got 1000000000000"),
        ({"dataset": 5}, "'dataset': expected one of cifar10, cifar100, shapes, got 5"),
        ({"data": []}, "'data': expected a string or null, got []"),
        ({"examples": 10**12}, "expected at most 1000000 examples, got more"),
        ({"dropout": "x"}, "'dropout': expected a finite number, got 'x'"),
    ]:
        (tmp_path / "run.json").write_text(json.dumps({"arguments": right | change}))
        wrong = rf"^error: {tmp_path}/run\.json.*{re.escape(message)}$"
        with pytest.raises(SystemExit, match=wrong):
            app.predict.main(weights)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_is_that_of_one_process_with_all_images(app):
    """Take six steps in float64, and the same with plain Chainer on the images of all ranks."""
    comm = chainermn.create_communicator("naive")
    chainer.global_config.dtype = np.float64
    args = SimpleNamespace(
        unit=4, dropout=0, lr=1, weight_decay=0.01, batchsize=4, seed=3, epoch=1
    )
    args.no_augment, args.graphs, args.mixed16, args.out = False, False, False, "unused"
    images = app.data.load("shapes", examples=50)
    trainer, network = app.training.create_trainer(
        args, comm, chainer.get_device("@numpy"), images
    )
    batches, optimizer = (
        get("main") for get in (trainer.updater.get_iterator, trainer.updater.get_optimizer)
    )
    np.random.seed(3)
    alone = chainer.links.Classifier(app.model.ResNet(4, 10, 0))
    reference = chainer.optimizers.MomentumSGD(momentum=0.9).setup(alone)
    for name, parameter in alone.namedparams():
        if name.endswith("/W"):
            parameter.update_rule.add_hook(WeightDecay(0.01))
    optimizer.lr = reference.lr = 0.02
    np.random.seed(comm.rank)
    losses = []
    for step in range(6):
        batch = chainer.dataset.concat_examples(batches.next())
        x, t = (np.concatenate(parts) for parts in zip(*comm.allgather_obj(batch), strict=True))
        assert len({image.tobytes() for image in x}) == 4 * comm.size
        optimizer.update(optimizer.target, *batch)
        alone.cleargrads()
        loss = alone(x, t)
        loss.backward()
        if step > 0:  # a multi-node optimizer first takes no step
            reference.update()
        losses.append(float(loss.array))
        own = float(optimizer.target.loss.array)
        assert sum(comm.allgather_obj(own)) / comm.size == pytest.approx(losses[-1], rel=1e-8)
    for (name, found), (_, wanted) in zip(
        sorted(network.namedparams()), sorted(alone.predictor.namedparams()), strict=True
    ):
        np.testing.assert_allclose(found.array, wanted.array, 1e-8, 1e-12, err_msg=name)
    mean = alone.predictor.block2.norm1.avg_mean
    np.testing.assert_allclose(network.block2.norm1.avg_mean, mean, rtol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", ["0", "1"], ids=["", "cuDNN"])
def test_learns_on_a_gpu(cudnn, read_log, tmp_path, monkeypatch):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    monkeypatch.setenv("CHAINER_COMPAT_CUDNN", cudnn)
    small = ["--examples", "1500", "--unit", "8", "--epoch", "8", "--batchsize", "15", "--gpu"]
    run_job(1, [HERE / "train.py", *small], cwd=tmp_path, timeout=LIMIT).check()
    assert read_log(tmp_path / "result")[-1][ACCURACY] > 0.3


@pytest.mark.nightly
def test_the_command_of_readme(tmp_path):
    job = run_job(2, [HERE / "train.py"], cwd=tmp_path, timeout=LIMIT).check()
    assert float(re.search(r"([\d.]+)% of the 1000 test images", job.stdout)[1]) > 95
