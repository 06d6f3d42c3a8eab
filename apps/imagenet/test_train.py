"""Train on a few ranks and check what comes out."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from PIL import Image

import chainermn
from chainermn.testing.mpiexec import run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
LOSS, ACCURACY, TOP5 = (f"validation/main/{name}" for name in ("loss", "accuracy", "top5"))
# Seconds after which a test counts as hung, even on a busy machine.
LIMIT = 300
PICTURES = ["accuracy.png", "confusion.png", "examples.png", "loss.png", "ranks.png"]


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


def read_model(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / "model.npz") as arrays:
        return dict(arrays)


def assert_equal_models(out: Path, other: Path) -> None:
    first, second = read_model(out), read_model(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# Arguments


def parse(app, *arguments: str):
    return app.options.parse_arguments(argparse.ArgumentParser(), arguments)


def test_options_are_those_of_the_original_example(app):
    typed = "-a alex -B 7 -b 9 -E 3 -j 2 -m mean.npy -r snapshot -o out a.txt -R images"
    typed += " --initmodel weights --test --communicator flat b.txt"
    args = parse(app, *typed.split())
    assert (args.train, args.val, args.root) == ("a.txt", "b.txt", Path("images"))
    assert (args.arch, args.batchsize, args.val_batchsize, args.epoch) == ("alex", 7, 9, 3)
    assert (args.loaderjob, args.mean, args.resume) == (2, Path("mean.npy"), "snapshot")
    assert (args.out, args.initmodel, args.test) == ("out/test", "weights", True)
    assert (args.communicator, args.drawn) == ("flat", False)
    args = parse(app, "--train", "a.txt", "-e", "5", "--val", "b.txt")
    assert (args.train, args.val, args.epoch) == ("a.txt", "b.txt", 5)
    assert (args.batchsize, args.val_batchsize, args.arch) == (32, 250, "resnet50")
    assert parse(app).drawn


def test_mean_image_of_the_original_example_is_described(app, tmp_path):
    np.save(tmp_path / "mean.npy", np.full((3, 5, 4), [[[10]], [[20.5]], [[30]]], np.float32))
    args = parse(app, "-a", "nin", "-m", str(tmp_path / "mean.npy"), "a.txt", "b.txt")
    listed = app.data.ImageList(["a.jpg", "b.jpg"], [0, 1])
    assert app.job.describe(args, listed, listed, {}) == {
        "arch": "nin",
        "insize": 227,
        "classes": ["0", "1"],
        "mean": [10, 20.5, 30],
        "deviation": [255] * 3,
    }


def test_names_in_another_order_than_the_labels(app, tmp_path):
    names, listed = tmp_path / "names.txt", app.data.ImageList(["a.jpg", "b.jpg"], [0, 2])
    args = parse(app, "--classes", str(names), "a.txt", "b.txt")
    for content, message in (
        ("cat\tCat\ndog\tDog\ncow\tCow\n", "FOLDER<tab>NAME are for prepare.py --classes"),
        ("2 cow\n0 cat\n1 dog\n", "got lines numbered 2, 0, 1: sort them"),
    ):
        names.write_text(content)
        with pytest.raises(ValueError, match=f"{names}: .*{message}"):
            app.job.describe(args, listed, listed, {})
    for accepted in (["0 cat", "1 dog", "2 cow"], ["1", "10", "2"], ["1 cat", "10 dog", "2 cow"]):
        names.write_text("\n".join(accepted))
        assert app.job.describe(args, listed, listed, {})["classes"] == accepted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--train", "a"], "either as TRAIN VAL or as --train TRAIN --val VAL"),
        (["a", "--val", "b"], "either as TRAIN VAL or as --train TRAIN --val VAL"),
        (["a"], "expected two lists, TRAIN and VAL, got 1"),
        (["a", "b", "c"], "expected two lists, TRAIN and VAL, got 3"),
        (["--val", "b"], "--train and --val belong together"),
        (["--finetune"], "--finetune needs initial weights: add --initmodel FILE"),
        (["--ema", "0.9", "--mixed16"], "--ema averages weights in float32"),
        (["--ema", "2"], "--ema must be between 0 and 1, got 2.0"),
        (["--clip", "-1"], "--clip must be above 0, got -1.0"),
        (["--epoch", "0"], "--epoch must be at least 1, got 0"),
        (["--checkpoint", "0"], "--checkpoint must be at least 1, got 0"),
        (["--graphs"], "--graphs needs --gpu"),
        (["--channels-last", "--gpu"], "needs --mixed16, CHAINER_COMPAT_CUDNN=1"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message, app, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(app, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# Training

# A few seconds; the iterations per epoch are 7.5.
SHORT = ["--epoch", "3", "--batchsize", "8", "--lr", "0.8", "--checkpoint", "4", "--seed", "1"]


@pytest.fixture(scope="module")
def two_ranks(app, run, lists, tmp_path_factory) -> tuple[str, Path]:
    """Train for three epochs; return what this rank prints, and the folder."""
    comm = chainermn.create_communicator()
    out = comm.bcast_obj(tmp_path_factory.mktemp("two_ranks") / "result")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(app.train.main, *lists, *SHORT, "--out", out)
    return printed.getvalue(), out


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_two_ranks_learn(app, few, two_ranks):
    """The log has what one process computes with the network that is saved."""
    _, out = two_ranks
    log = read_log(out)
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert [row["iteration"] for row in log] == [8, 15, 23]
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert log[-1]["images/s"] > 0
    assert log[-1]["minutes left"] == 0

    images = app.data.Images(app.data.ImageList.read(few / "val.txt"), few, 48)
    pixels, digits = (np.stack(part) for part in zip(*images[:], strict=True))
    shares = app.trained.load(out / "model.npz").shares(pixels).astype(np.float64)
    own = shares[np.arange(31), digits]
    place = (shares > own[:, None]).sum(axis=1)
    assert log[-1][LOSS] == pytest.approx(-np.log(own).mean(), rel=1e-4)
    assert log[-1][ACCURACY] == pytest.approx((place == 0).mean(), abs=1e-12)
    assert log[-1][TOP5] == pytest.approx((place < 5).mean(), abs=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--mixed16"]], ids=["float32", "mixed16"])
@pytest.mark.parametrize("cudnn", ["0", "1"], ids=["", "cuDNN"])
def test_learns_on_a_gpu(cudnn, precision, app, tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    root = tmp_path / "drawn"
    app.generated.create(root, 600, 101)
    options = ["--train", root / "train.txt", "--val", root / "val.txt", "--root", root]
    options += ["--epoch", "3", "--batchsize", "20", "--lr", "0.8", "--loaderjob", "1"]
    options += ["--seed", "1", "--gpu", "--arch", "small", *precision]
    out = tmp_path / "result"
    env = {"CHAINER_COMPAT_CUDNN": cudnn}
    job = run_job(1, [HERE / "train.py", *options, "--out", out], cwd=tmp_path, env=env)
    assert job.returncode == 0, job
    log = read_log(out)
    assert log[-1]["main/loss"] < log[0]["main/loss"]


@pytest.mark.mpi(2, timeout=LIMIT)
def test_what_is_written(two_ranks):
    _, out = two_ranks
    snapshots = [f"snapshot_iter_{iteration}.0" for iteration in (16, 20, 23)]
    networks = ["best.json", "best.npz", "model.json", "model.npz"]
    expected = [*PICTURES, *snapshots, *networks, "log", "run.json"]
    assert sorted(path.name for path in out.glob("[!.]*")) == sorted(expected)
    for name in PICTURES:
        with Image.open(out / name) as picture:
            assert picture.format == "PNG"
    for name in ("best.npz", "model.npz", *snapshots):
        with zipfile.ZipFile(out / name) as archive:
            kinds = {member.compress_type for member in archive.infolist()}
        assert kinds == {zipfile.ZIP_STORED}, name


@pytest.mark.mpi(2, timeout=LIMIT)
def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    printed, out = two_ranks
    if chainermn.create_communicator().rank == 1:
        assert printed == ""
        return
    first, *about, header, _, _, _, summary, best, files = printed.splitlines()
    rows = printed.splitlines()[-6:-3]
    assert about[:2] == ["120 images to train with, 31 to validate with", about[1]]
    assert about[2].split() == ["0", "circle", "12", "4"]
    assert len(about) == 12
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert header.split()[:2] == ["epoch", "main/loss"]
    assert header.split()[-3:] == ["images/s", "minutes", "left"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    accuracies = [row[ACCURACY] for row in read_log(out)]
    of = "of the validation images recognized"
    assert summary == f"{accuracies[-1]:.2%} {of} after 3 epochs"
    epoch = 1 + accuracies.index(max(accuracies))
    assert best == f"the best: {max(accuracies):.2%} after epoch {epoch}"
    assert files.startswith(f"curves, log and networks: {out}/{{accuracy.png,")
    assert "\033" not in printed


@pytest.mark.mpi(2, timeout=LIMIT)
def test_predict(app, two_ranks, few, capsys):
    _, out = two_ranks
    images = [few / "val/star-00004.jpg", few / "val/ring-00006.jpg"]
    assert app.predict.main(["--model", str(out / "model.npz"), *map(str, images)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[6]] == [str(image) for image in images]
    shares = [re.fullmatch(r" +(\d+\.\d)%  [a-z]+", line)[1] for line in lines[1:6]]
    assert sorted(map(float, shares), reverse=True) == list(map(float, shares))


@pytest.mark.mpi(2, timeout=LIMIT)
def test_stopped_twice_and_started_again_is_as_if_undisturbed(
    app, run, stop, two_ranks, lists, shared_tmp_path, capsys
):
    """The second time, from a given snapshot that is compressed, as Chainer does by default."""
    _, undisturbed = two_ranks
    is_root = chainermn.create_communicator().rank == 0
    out, other = shared_tmp_path / "result", shared_tmp_path / "other"
    options = [*lists, *SHORT, "--out", out]
    for last, begun in ((10, None), (19, 8)):
        capsys.readouterr()
        stop(last, app.train.main, *options)
        resuming = f"resuming after iteration {begun}, epoch 1, from "
        assert (resuming in capsys.readouterr().out) == (is_root and begun is not None)
    if is_root:
        shutil.copytree(out, other)
        snapshot = other / "snapshot_iter_12.0"
        with np.load(snapshot, allow_pickle=True) as saved:
            arrays = dict(saved)
        with snapshot.open("wb") as file:
            np.savez_compressed(file, **arrays)
    run(app.train.main, *options)
    assert ("resuming after iteration 16, epoch 2, from " in capsys.readouterr().out) == is_root
    run(app.train.main, *lists, *SHORT, "--out", other, "--resume", other / "snapshot_iter_12.0")
    shown = re.findall(r"resuming after iteration (\d+)", capsys.readouterr().out)
    assert shown == ["12"] * is_root
    for resumed in (out, other):
        assert_equal_models(resumed, undisturbed)
    rows, expected = (map(without_times, read_log(folder)) for folder in (out, undisturbed))
    assert list(rows) == list(expected)


def without_times(row):
    times = {"elapsed_time", "images/s", "minutes left", "parallel efficiency", "slowest rank"}
    return {k: v for k, v in row.items() if k not in times and not k.startswith("time/")}


@pytest.mark.mpi(3, timeout=LIMIT)
def test_finished_run_goes_on_with_another_number_of_ranks(
    app, run, only, lists, shared_tmp_path, capsys
):
    is_root = chainermn.create_communicator().rank == 0
    out = shared_tmp_path
    options = [*lists, "--batchsize", "8", "--out", out]
    with only(2) as is_seen:
        if is_seen:
            run(app.train.main, *options, "--epoch", "1")
    log = read_log(out)
    capsys.readouterr()
    run(app.train.main, *options, "--epoch", "1")
    ended = "Training has ended there, after 1 epoch: ask for more, or use"
    assert (ended in capsys.readouterr().err) == is_root
    assert read_log(out) == log
    run(app.train.main, *options, "--epoch", "2")
    assert ("resuming after iteration 8, epoch 1, from " in capsys.readouterr().out) == is_root
    log = read_log(out)
    assert [row["iteration"] for row in log] == [8, 13]

    # A network is evaluated on any number of ranks.
    best = json.loads((out / "best.json").read_text())
    top5 = log[best["epoch"] - 1][TOP5]
    expected = f"{best['value']:.2%} of the validation images recognized, {top5:.2%} among"
    for ranks, weights in ((3, []), (1, [out / "best.npz"])):
        with only(ranks) as is_seen:
            if is_seen:
                run(app.train.main, *options, "--evaluate", *weights)
        shown = capsys.readouterr().out.splitlines()[1:]
        assert [line.startswith(expected) for line in shown] == [True] * is_root
    assert read_log(out) == log


@pytest.mark.mpi(2, timeout=LIMIT)
def test_fine_tuning_with_another_number_of_classes(
    app, run, two_ranks, few, shared_tmp_path, capsys
):
    """Train on three of the classes, with the first layers frozen and a new head."""
    for part in ("train", "val"):
        lines = (few / f"{part}.txt").read_text().splitlines(keepends=True)
        chosen = [line for line in lines if int(line.split()[1]) < 3]
        if chainermn.create_communicator().rank == 0:
            (shared_tmp_path / f"{part}.txt").write_text("".join(chosen))
    begun = two_ranks[1] / "model.npz"
    options = ["--train", shared_tmp_path / "train.txt", "--val", shared_tmp_path / "val.txt"]
    options += ["--root", few]
    options += ["--initmodel", begun, "--finetune", "--freeze", "conv1", "bn1"]
    options += ["--epoch", "1", "--batchsize", "6", "--loaderjob", "0"]
    options += ["--ema", "0.9", "--clip", "1", "--tensorboard"]
    run(app.train.main, *options, "--out", shared_tmp_path / "result")
    if chainermn.create_communicator().rank == 0:
        _, network, colors, *_, weights = capsys.readouterr().out.splitlines()[:4]
        assert network == f"network: small, as in {begun}"
        assert colors.startswith("colors: mean 1") and colors.endswith(
            f"as {begun} was trained with"
        )
        assert weights == f"24 arrays of {begun} loaded; new: fc/W, fc/b"
    begun_with, now = (
        json.loads((out / "model.json").read_text())
        for out in (two_ranks[1], shared_tmp_path / "result")
    )
    assert (now["mean"], now["deviation"]) == (begun_with["mean"], begun_with["deviation"])
    before, after = read_model(two_ranks[1]), read_model(shared_tmp_path / "result")
    assert after["fc/W"].shape == (3, 128)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    # Every batch normalization has a counter that stays 0.
    assert {name for name in same if not name.endswith("/N")} == {
        name for name in before if name.startswith(("conv1/", "bn1/")) and name != "bn1/N"
    }
    (events,) = (shared_tmp_path / "result/tensorboard").iterdir()
    assert ACCURACY.encode() in events.read_bytes()


@pytest.mark.mpi(2, timeout=LIMIT)
def test_fine_tuning_from_pytorch_and_back(
    app, run, stop, few, shared_tmp_path, shallow, capsys, on_rank_0, fails
):
    """Everything uses the colors that torchvision trained with, also in a resumed run."""
    is_root = chainermn.create_communicator().rank == 0
    weights, out = shared_tmp_path / "resnet50.pth", shared_tmp_path / "result"
    exported = shared_tmp_path / "model.safetensors"
    names = app.models.torchvision.NAMES["resnet50"]

    def write() -> None:
        from safetensors.numpy import save_file  # not on all machines with a GPU

        saved = chainer.serializers.npz.serialize(app.models.create("resnet50", 1000))
        save_file({names[own]: array for own, array in saved.items()}, weights)
        for name in ("train.txt", "val.txt"):
            lines = (few / name).read_text().splitlines(keepends=True)[::6]
            (shared_tmp_path / name).write_text("".join(lines))
        for name in ("classes.txt", "mean.json"):
            shutil.copy(few / name, shared_tmp_path)

    on_rank_0(write)
    images = [shared_tmp_path / "train.txt", shared_tmp_path / "val.txt", "--root", few]
    images += ["--loaderjob", "0"]
    options = [*images, "--initmodel", weights, "--finetune", "--freeze", "conv1", "bn1"]
    options += ["--epoch", "1", "--batchsize", "5", "--checkpoint", "1", "--out", out]
    stop(2, app.train.main, *options)
    run(app.train.main, *options)
    printed = capsys.readouterr().out
    for line in (
        f"network: resnet50, as in {weights}\n",
        f"colors: mean 123.675 116.28 103.53, deviation 58.395 57.12 57.375, as {weights} was tra",
        f"{len(names) - 2} arrays of {weights} loaded; new: fc/W, fc/b\n",
        "resuming after iteration 1, ",
    ):
        assert (line in printed) == is_root
    about = json.loads((out / "model.json").read_text())
    colors = app.models.torchvision.COLORS
    assert (about["arch"], about["mean"]) == ("resnet50", colors["mean"])
    np.testing.assert_allclose(
        app.trained.load(out / "model.npz").recognizer.mean.ravel(), colors["mean"], rtol=1e-6
    )
    differs = ["--mean", few / "mean.json"]
    assert f"{weights} was trained with mean 123.675" in fails(app.train.main, *options, *differs)

    on_rank_0(lambda: app.export.main(["--model", str(out / "model.npz"), "-o", str(exported)]))
    with app.weights.open_weights(exported) as found:
        assert found.about == {key: about[key] for key in ("arch", "classes", *colors)}
    capsys.readouterr()
    run(app.train.main, *images, "--evaluate", exported)
    expected = f"{read_log(out)[-1][ACCURACY]:.2%} of the validation images recognized, "
    assert (expected in capsys.readouterr().out) == is_root


@pytest.mark.mpi(2, timeout=LIMIT)
def test_bad_input_ends_all_ranks_with_one_message(
    app, fails, two_ranks, lists, few, shared_tmp_path, not_drawn
):
    comm, place = chainermn.create_communicator(), shared_tmp_path
    snapshot, model = two_ranks[1] / "snapshot_iter_23.0", two_ranks[1] / "model.npz"
    description = (two_ranks[1] / "model.json").read_text()
    absent, file, links, pipe = (place / name for name in ("absent", "file", "links", "pipe"))
    names = ("relabeled", "leading", "renamed", "links/list")
    relabeled, leading, renamed, linked = (place / f"{name}.txt" for name in names)
    strange, strange_model = place / "strange.0", place / "strange.npz"
    alone, colors = place / "alone.npz", place / "mean.json"
    if comm.rank == 0:
        file.touch()
        relabeled.write_text((few / "val.txt").read_text().replace(" 9\n", " 12\n"))
        renamed.write_text((few / "classes.txt").read_text().replace("star", "sun"))
        leading.write_text("val/heart-00009.jpg 1\n../../etc/passwd 0\n")
        links.mkdir()
        (links / "a.jpg").symlink_to(few / "val/heart-00009.jpg")
        linked.write_text("a.jpg 1\n")
        os.mkfifo(pipe)
        shutil.copytree(two_ranks[1], place / "trained")
        shutil.copy(model, alone)
        colors.write_text('{"mean": [1, 2, 3], "deviation": [4, 5, 6]}')
        set_traps(snapshot, strange, place / "trapped")
        set_traps(model, strange_model, place / "trapped")
    comm.allgather_obj(None)
    other = (
        "does not have the weights of nin for 10 classes: it lacks mlpconv1/0/W, "
        "mlpconv1/0/b, mlpconv1/1/W, mlpconv1/1/b, mlpconv1/2/W and 19 more; it also has"
    )
    described = f"{model}, according to {model.with_name('model.json')}, is of small, not of nin"
    refusal = "is a pickle of more than None, numbers and strings: it has a call of posix.mkdir"
    cases = [
        (["--train", leading], f"{leading}:2: '../../etc/passwd' leads out of {few}; --allow-o"),
        (
            ["--train", linked, "--val", linked, "--root", links],
            f"{linked}:1: 'a.jpg' leads out of {links}; --al",
        ),
        (["--train", pipe], f"{pipe}: expected a regular file, got a pipe or a device"),
        (["--mean", pipe], f"{pipe}: expected a regular file, got a pipe or a device"),
        (["--resume", strange], f"in {strange} {refusal}"),
        (["--initmodel", strange_model], f"in {strange_model} {refusal}"),
        (["--initmodel", strange_model, "--finetune"], f"in {strange_model} {refusal}"),
        (["--evaluate", strange_model], f"in {strange_model} {refusal}"),
        (["--resume", snapshot, "--arch", "nin"], f"{snapshot} does not fit"),
        (["--initmodel", model, "--arch", "nin"], f"{described}: omit --arch"),
        (["--evaluate", model, "--arch", "nin"], f"{described}: omit --arch"),
        (["--initmodel", alone, "--arch", "nin"], f"{alone} {other}"),
        (["--initmodel", alone, "--arch", "nin", "--finetune"], f"{alone} {other}"),
        (["--evaluate", alone, "--arch", "nin"], f"{alone} {other}"),
        (["--initmodel", model, "--mean", colors], f"{model} was trained with mean "),
        (["--evaluate", model, "--mean", colors], f"{model} was trained with mean "),
        (
            ["--evaluate", "--out", place / "trained", "--classes", renamed],
            f"{place}/trained/best.npz was trained with other classes than these lists",
        ),
        (["--evaluate"], f"[Errno 2] No such file or directory: '{place}/result/best.npz'"),
        (
            ["--root", place],
            f"{place}/val/circle-00000.jpg ({few}/val.txt:1) has changed since pre",
        ),
        (["--train", absent], f"{absent} is missing: prepare.py makes lists of your images"),
        (["--val", relabeled], f"{relabeled}: expected labels from 0 to 9 for 10 names"),
        (["--out", place / "trained", "--arch", "nin"], f"{place}/trained/snapshot_iter_23"),
        (["--freeze", "conv9"], "--freeze: there is no layer 'conv9', but bn1, bn2, "),
        (["--out", file / "result"], f"[Errno 20] Not a directory: '{file}/result'"),
    ]
    common = [*lists, "--out", place / "result"]
    for options, message in cases:
        line = fails(app.train.main, *common, *options)
        assert re.match(f"error: ('.*' )?{re.escape(message)}", line)
    assert not (place / "trapped").exists()
    assert (place / "trained/model.json").read_text() == description


@pytest.mark.mpi(2, timeout=LIMIT)
def test_same_with_workers_and_result_of_one_seed(
    app, run, two_ranks, lists, shared_tmp_path, capfd
):
    # Written to the file descriptor, which capfd restores, as a script's output is.
    with open(1, "w", closefd=False) as output, contextlib.redirect_stdout(output):
        print("before", flush=True)
        options = ["--loaderjob", "1", "--quiet", "--out", shared_tmp_path]
        run(app.train.main, *lists, *SHORT, *options)
    assert capfd.readouterr().out == "before\n"
    assert_equal_models(shared_tmp_path, two_ranks[1])


@pytest.mark.mpi(2, timeout=LIMIT)
def test_first_epochs_on_one_rank_with_other_options(app, run, only, lists, few, shared_tmp_path):
    first, second = shared_tmp_path / "first", shared_tmp_path / "second"
    options = ["--epoch", "1", "--schedule", "step", "--label-smoothing", "0", "--batchsize", "20"]
    with only(1) as is_seen:
        if is_seen:
            run(app.train.main, *lists, *options, "--val_batchsize", "7", "--out", first)
    assert read_log(first)[-1]["iteration"] == 6
    # Continue with its weights, in float16 and with batch normalization over both ranks.
    options = ["--epoch", "1", "--initmodel", first / "model.npz", "--mixed16", "--mnbn"]
    options += ["--communicator", "flat", "--batchsize", "1"]
    lines = (few / "val.txt").read_text().splitlines(keepends=True)[-5:]
    chosen = shared_tmp_path / "few.txt"
    if chainermn.create_communicator().rank == 0:
        chosen.write_text("".join(lines))  # float16 is slow on a CPU
    run(app.train.main, *lists, *options, "--train", chosen, "--val", chosen, "--out", second)
    log = read_log(second)
    assert [row["iteration"] for row in log] == [3]
    assert np.isfinite(log[-1]["main/loss"])
    dtypes = {name: array.dtype for name, array in read_model(second).items()}
    assert (dtypes["conv1/W"], dtypes["bn1/gamma"]) == (np.float16, np.float32)


def cut_off(root: Path) -> str:
    """Cut off an image, and return how messages name it."""
    victim = root / "train/circle-00110.jpg"
    victim.write_bytes(victim.read_bytes()[:-100])  # its header is whole
    (root / "train.txt.sizes.npy").unlink()
    return f"cannot read {victim} ({root}/train.txt:111) on {socket.gethostname()} "


@pytest.mark.mpi(2, timeout=LIMIT)
def test_damaged_file_is_skipped(app, run, few, shared_tmp_path, capsys):
    comm, root = chainermn.create_communicator(), shared_tmp_path / "damaged"
    if comm.rank == 0:
        shutil.copytree(few, root)
    message = comm.bcast_obj(cut_off(root) if comm.rank == 0 else None)
    options = [root / "train.txt", root / "val.txt", "--root", root, "--arch", "small"]
    options += ["--loaderjob", "0", "--epoch", "1", "--batchsize", "30", "--skip-unreadable"]
    run(app.train.main, *options, "--out", shared_tmp_path / "result")
    out, err = capsys.readouterr()
    assert re.fullmatch(f"skipped: {re.escape(message)}.*\n", "".join(comm.allgather_obj(err)))
    if comm.rank == 0:
        assert "images skipped, as they could not be read: 1\n" in out
        assert "recognized after 1 epoch\n" in out


@pytest.mark.mpi(2, timeout=LIMIT)
def test_each_skipped_file_is_said_once(app, capsys):
    comm, to_batch = chainermn.create_communicator("naive"), SimpleNamespace(skipped={})
    say = app.reports.SkippedFiles(comm, to_batch)
    to_batch.skipped["a"] = "cannot read a"
    say()
    say()
    name = f"b{comm.rank}"
    to_batch.skipped[name] = f"cannot read {name}"
    say()
    lines = comm.allgather_obj(capsys.readouterr().err.splitlines())
    assert lines == [[f"skipped: cannot read {name}" for name in ("a", "b0", "b1")], []]


@pytest.mark.mpi(1, timeout=LIMIT)
def test_damaged_files_to_validate_with_are_found_before_training(app, fails, few, tmp_path):
    root = tmp_path / "damaged"
    shutil.copytree(few, root)
    victim = root / "val/ring-00006.jpg"
    victim.write_bytes(victim.read_bytes()[:-100])
    (root / "val.txt.sizes.npy").unlink()
    options = [root / "train.txt", root / "val.txt", "--root", root, "--arch", "small"]
    line = fails(app.train.main, *options, "--test", "--out", tmp_path / "result")
    assert line.startswith(f"error: cannot read {victim} ({root}/val.txt:7) on ")
    assert line.endswith("--skip-unreadable leaves such files out")  # what inspection says


@pytest.mark.mpi(1, timeout=LIMIT)
def test_class_of_which_hardly_an_image_can_be_read_is_refused(app, fails, few, tmp_path):
    root = tmp_path / "damaged"
    shutil.copytree(few, root)
    for victim in (root / "train").glob("circle-*.jpg"):
        victim.write_bytes(b"")
    options = [root / "train.txt", root / "val.txt", "--root", root, "--arch", "small"]
    line = fails(app.train.main, *options, "--skip-unreadable", "--out", tmp_path / "result")
    assert line == (
        f"error: {root}/train.txt: only 0 of 12 images of class 0 circle can be read: get them "
        "again, or delete their lines and run without --skip-unreadable"
    )


@pytest.mark.mpi(1, timeout=LIMIT)
def test_run_resumes_without_files_that_were_damaged_since(app, run, stop, few, tmp_path, capsys):
    """Also in the middle of an epoch."""
    root = tmp_path / "damaged"
    shutil.copytree(few, root)
    options = [root / "train.txt", root / "val.txt", "--root", root, "--arch", "small"]
    options += ["--loaderjob", "0", "--epoch", "2", "--batchsize", "20", "--checkpoint", "4"]
    options += ["--skip-unreadable", "--out", tmp_path / "result"]
    stop(5, app.train.main, *options)
    (root / "train/circle-00110.jpg").write_bytes(b"")
    capsys.readouterr()
    run(app.train.main, *options)
    assert "resuming after iteration 4, " in capsys.readouterr().out
    assert [row["iteration"] for row in read_log(tmp_path / "result")] == [6, 12]


SLOW = f"""
import sys, threading
sys.path.insert(0, {str(HERE)!r})
import images, job, train

begun, look = threading.Event(), images.check_file
update = train.chainer.training.StandardUpdater.update

def update_first(updater):
    update(updater)
    begun.set()

def look_later(*arguments):
    begun.wait({LIMIT})
    look(*arguments)

job.SECONDS, images.check_file = 0, look_later
train.chainer.training.StandardUpdater.update = update_first
train.main()
"""


def test_damaged_file_to_validate_with_ends_the_job_before_it_validates(app, tmp_path):
    root = tmp_path / "few"
    app.generated.create(root, 120, 31)
    victim = root / "val/ring-00006.jpg"
    victim.write_bytes(victim.read_bytes()[:-100])
    (root / "val.txt.sizes.npy").unlink()
    (tmp_path / "slow.py").write_text(SLOW)
    options = [root / "train.txt", root / "val.txt", "--root", root, "--arch", "small"]
    options += ["--epoch", "1", "--batchsize", "30", "--loaderjob", "0"]
    job = run_job(2, [tmp_path / "slow.py", *options], cwd=tmp_path, timeout=LIMIT)
    assert (
        job.check(fails=True).stderr.count(f"error: cannot read {victim} ({root}/val.txt:7) on")
        == 1
    )
    assert "leaves such files out" in job.stderr  # what inspection says
    assert "ends the job)" in job.stderr and "Traceback" not in job.stderr
    assert "recognized" not in job.stdout and not (tmp_path / "result/log").exists()


@pytest.mark.each_mpi
def test_damaged_file_ends_the_job(app, tmp_path):
    root = tmp_path / "few"
    app.generated.create(root, 120, 31)
    message = cut_off(root)
    options = ["--train", root / "train.txt", "--val", root / "val.txt", "--root", root]
    options += ["--arch", "small", "--epoch", "1", "--batchsize", "30", "--loaderjob", "1"]
    job = run_job(2, [HERE / "train.py", *options], cwd=tmp_path, timeout=LIMIT).check(fails=True)
    (line,) = (line for line in job.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: {message}")
    assert re.search(r"--skip-unreadable continues .*\(rank [01] of 2 on .* ends the job\)$", line)
    assert "Traceback" not in job.stderr


@pytest.mark.nightly
@pytest.mark.mpi(2, timeout=900)
def test_drawn_images_are_recognized(app, run, shared_tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shared_tmp_path)
    run(app.train.main)
    if chainermn.create_communicator().rank == 0:
        assert capsys.readouterr().out.splitlines()[1].startswith("drawing 3499 images into")
    assert read_log(shared_tmp_path / "result")[-1][ACCURACY] > 0.9
