"""Train on a few ranks and check what comes out."""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from chainer.backends import cuda
from PIL import Image

from chainermn.testing.in_turn import run_in_turn
from chainermn.testing.mpiexec import Job, JobResult, direct_environment, mpiexec_command, run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ACCURACY = "validation/main/accuracy"
# Seconds after which a job counts as hung, even on a busy machine.
LIMIT = 600
PICTURES = ["accuracy.png", "confusion.png", "loss.png", "ranks.png"]


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


def parse(app, monkeypatch, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return app.options.parse_arguments(argparse.ArgumentParser())


def test_options_are_those_of_the_original_example(app, monkeypatch):
    typed = "-a alex -B 7 -b 9 -E 3 -j 2 -m mean.npy -r snapshot -o out a.txt -R images"
    typed += " --initmodel weights --test --communicator flat b.txt"
    args = parse(app, monkeypatch, *typed.split())
    assert (args.train, args.val, args.root) == ("a.txt", "b.txt", Path("images"))
    assert (args.arch, args.batchsize, args.val_batchsize, args.epoch) == ("alex", 7, 9, 3)
    assert (args.loaderjob, args.mean, args.resume) == (2, Path("mean.npy"), "snapshot")
    assert (args.out, args.initmodel, args.test) == ("out/test", "weights", True)
    assert (args.communicator, args.drawn) == ("flat", False)
    args = parse(app, monkeypatch, "--train", "a.txt", "-e", "5", "--val", "b.txt")
    assert (args.train, args.val, args.epoch) == ("a.txt", "b.txt", 5)
    assert (args.batchsize, args.val_batchsize, args.arch) == (32, 250, "resnet50")
    assert parse(app, monkeypatch).drawn


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
    ],
)
def test_arguments_that_do_not_go_together(arguments, message, app, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(app, monkeypatch, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# Training

# Small enough to train in seconds, and large enough to see that something is learned.
LEARNING = ["--epoch", "3", "--batchsize", "20", "--lr", "0.8", "--loaderjob", "1", "--seed", "1"]
SHORT = [*LEARNING, "--checkpoint", "4"]


@pytest.fixture(scope="module")
def two_ranks(train, drawn, tmp_path_factory) -> tuple[JobResult, Path]:
    out = tmp_path_factory.mktemp("two_ranks") / "result"
    return train(2, drawn, out, *SHORT), out


@pytest.mark.each_mpi
def test_two_ranks_learn(two_ranks):
    _, out = two_ranks
    log = read_log(out)
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert log[-1]["iteration"] == 45
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert log[-1]["validation/main/top5"] > 0.55
    assert log[-1][ACCURACY] <= log[-1]["validation/main/top5"]
    assert log[-1]["images/s"] > 0
    assert log[-1]["minutes left"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--mixed16"]], ids=["float32", "mixed16"])
@pytest.mark.parametrize("cudnn", ["0", "1"], ids=["", "cuDNN"])
def test_learns_on_a_gpu(cudnn, precision, drawn_lists, tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    options = [*drawn_lists, "--gpu", "--arch", "small", *LEARNING, *precision]
    out = tmp_path / "result"
    env = {"CHAINER_COMPAT_CUDNN": cudnn}
    job = run_job(1, [HERE / "train.py", *options, "--out", out], cwd=tmp_path, env=env)
    assert job.returncode == 0, job
    log = read_log(out)
    assert log[-1]["main/loss"] < log[0]["main/loss"]


def test_validation_is_exact_though_ranks_do_not_divide_it(two_ranks):
    for row in read_log(two_ranks[1]):
        for key in (ACCURACY, "validation/main/top5"):
            assert row[key] * 101 == pytest.approx(round(row[key] * 101), abs=1e-9)


def test_what_is_written(two_ranks):
    _, out = two_ranks
    snapshots = [f"snapshot_iter_{iteration}.0" for iteration in (40, 44, 45)]
    networks = ["best.json", "best.npz", "model.json", "model.npz"]
    expected = [*PICTURES, *snapshots, *networks, "log", "run.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(expected)
    for name in PICTURES:
        with Image.open(out / name) as picture:
            assert picture.format == "PNG"
    for name in ("best.npz", "model.npz", *snapshots):
        with zipfile.ZipFile(out / name) as archive:
            kinds = {member.compress_type for member in archive.infolist()}
        assert kinds == {zipfile.ZIP_STORED}, name


def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    job, out = two_ranks
    first, header, *rows, summary, best, files = job.stdout.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert header.split()[:2] == ["epoch", "main/loss"]
    assert header.split()[-3:] == ["images/s", "minutes", "left"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert re.fullmatch(r"\d+\.\d\d% of the validation images .* after 3 epochs", summary)
    assert re.fullmatch(r"the best: \d+\.\d\d% after epoch \d", best)
    assert files.startswith(f"curves, log and networks: {out}/{{accuracy.png,")
    assert "\033" not in job.stdout


def test_predict(two_ranks, drawn):
    _, out = two_ranks
    images = [drawn / "val/star-00004.jpg", drawn / "val/ring-00006.jpg"]
    command = [HERE / "predict.py", "--model", out / "model.npz"]
    environment = direct_environment() | {"OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [*command, *images], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert [lines[0], lines[6]] == [str(image) for image in images]
    shares = [re.fullmatch(r" +(\d+\.\d)%  [a-z]+", line)[1] for line in lines[1:6]]
    assert sorted(map(float, shares), reverse=True) == list(map(float, shares))

    shown = subprocess.run(
        [*command, HERE / "README.md", images[0]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shown.returncode == 1
    assert "README.md: UnidentifiedImageError" in shown.stderr
    assert shown.stdout.count("%") == 5


@pytest.fixture(scope="module")
def killed(kills_itself, drawn_lists, tmp_path_factory) -> Path:
    """Train like `two_ranks`, but killed twice; return the folder that this leaves."""
    folder = tmp_path_factory.mktemp("killed")
    options = [*drawn_lists, "--out", folder / "result", "--arch", "small", *SHORT]
    for last in (10, 31):
        program = [kills_itself, last, HERE / "train.py", *options]
        job = Job(2, list(map(str, program)), cwd=folder).wait(LIMIT)
        job.check(fails=True)
        assert ("resuming after iteration 8, epoch 0, from " in job.stdout) == (last == 31), job
    return folder / "result"


def test_killed_and_started_again_is_as_if_undisturbed(two_ranks, killed, train, drawn, tmp_path):
    _, undisturbed = two_ranks
    out = shutil.copytree(killed, tmp_path / "result")
    job = train(2, drawn, out, *SHORT)
    assert "resuming after iteration 30, epoch 2, from " in job.stdout
    assert_equal_models(out, undisturbed)
    assert list(map(without_times, read_log(out))) == list(
        map(without_times, read_log(undisturbed))
    )


def without_times(row):
    times = {"elapsed_time", "images/s", "minutes left", "parallel efficiency", "slowest rank"}
    return {k: v for k, v in row.items() if k not in times and not k.startswith("time/")}


def test_resumed_from_a_given_snapshot_it_is_as_if_undisturbed(
    two_ranks, killed, train, drawn, tmp_path
):
    """The snapshot is compressed, as Chainer does unless told otherwise."""
    _, undisturbed = two_ranks
    out = shutil.copytree(killed, tmp_path / "result")
    assert (out / "snapshot_iter_30.0").exists()  # newer than the given one
    snapshot = out / "snapshot_iter_24.0"
    with np.load(snapshot, allow_pickle=True) as saved:
        arrays = dict(saved)
    with snapshot.open("wb") as file:
        np.savez_compressed(file, **arrays)
    options = [*SHORT, "--resume", snapshot]
    job = train(2, drawn, out, *options)
    assert re.findall(r"resuming after iteration (\d+)", job.stdout) == ["24"]
    assert_equal_models(out, undisturbed)


def test_finished_run_goes_on_with_another_number_of_ranks(two_ranks, train, drawn, tmp_path):
    out = shutil.copytree(two_ranks[1], tmp_path / "result")
    job = train(3, drawn, out, *SHORT, warns=True)
    assert "Training has ended there, after 3 epochs: ask for more, or use" in job.stderr
    assert read_log(out) == read_log(two_ranks[1])
    job = train(3, drawn, out, *SHORT, "--epoch", "4")
    assert "resuming after iteration 45, epoch 3, from " in job.stdout
    assert [row["iteration"] for row in read_log(out)] == [15, 30, 45, 55]


def test_evaluation_without_training(two_ranks, train, drawn, tmp_path):
    best = json.loads((two_ranks[1] / "best.json").read_text())
    log = read_log(two_ranks[1])
    top5 = log[best["epoch"] - 1]["validation/main/top5"]
    expected = f"{best['value']:.2%} of the validation images recognized, {top5:.2%} among"
    out = shutil.copytree(two_ranks[1], tmp_path / "result")
    for ranks, options in ((1, []), (3, [two_ranks[1] / "best.npz"])):
        job = train(ranks, drawn, out, "--loaderjob", "0", "--evaluate", *options)
        assert job.stdout.splitlines()[1].startswith(expected)
    assert read_log(out) == log
    other = tmp_path / "classes.txt"
    other.write_text((drawn / "classes.txt").read_text().replace("star", "sun"))
    job = train(2, drawn, out, "--loaderjob", "0", "--evaluate", "--classes", other, fails=True)
    assert f"error: {out}/best.npz was trained with other classes than these lists" in job.stderr


def test_fine_tuning_with_another_number_of_classes(two_ranks, train, drawn, tmp_path):
    """Train on three of the classes, with the first layers frozen and a new head."""
    names = (drawn / "classes.txt").read_text().splitlines()[:3]
    for part in ("train", "val"):
        lines = (drawn / f"{part}.txt").read_text().splitlines(keepends=True)
        few = [line for line in lines if int(line.split()[1]) < len(names)]
        (tmp_path / f"{part}.txt").write_text("".join(few))
    begun = two_ranks[1] / "model.npz"
    options = ["--train", tmp_path / "train.txt", "--val", tmp_path / "val.txt"]
    options += ["--mean", drawn / "mean.json", "--initmodel", begun, "--finetune"]
    options += [
        "--freeze",
        "conv1",
        "bn1",
        "--epoch",
        "1",
        "--batchsize",
        "10",
        "--loaderjob",
        "0",
    ]
    options += ["--ema", "0.9", "--clip", "1", "--tensorboard"]
    job = train(2, drawn, tmp_path / "result", *options)
    assert f"24 arrays of {begun} loaded; new: fc/W, fc/b\n" in job.stdout
    before, after = read_model(two_ranks[1]), read_model(tmp_path / "result")
    assert after["fc/W"].shape == (3, 128)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    # Every batch normalization has a counter that stays 0.
    assert {name for name in same if not name.endswith("/N")} == {
        name for name in before if name.startswith(("conv1/", "bn1/")) and name != "bn1/N"
    }
    (events,) = (tmp_path / "result/tensorboard").iterdir()
    assert ACCURACY.encode() in events.read_bytes()


def test_bad_input_ends_all_ranks_with_one_message(two_ranks, drawn_lists, drawn, tmp_path):
    snapshot, model = two_ranks[1] / "snapshot_iter_45.0", two_ranks[1] / "model.npz"
    absent, file = tmp_path / "absent", tmp_path / "file"
    file.touch()
    relabeled = tmp_path / "relabeled.txt"
    relabeled.write_text((drawn / "val.txt").read_text().replace(" 9\n", " 12\n"))
    shutil.copytree(two_ranks[1], tmp_path / "trained")
    description = (tmp_path / "trained/model.json").read_text()
    other = (
        "does not have the weights of this network: it lacks mlpconv1/0/W, "
        "mlpconv1/0/b, mlpconv1/1/W, mlpconv1/1/b, mlpconv1/2/W and 19 more; it also has"
    )
    strange, strange_model = tmp_path / "strange.0", tmp_path / "strange.npz"
    set_traps(snapshot, strange, tmp_path / "trapped")
    set_traps(model, strange_model, tmp_path / "trapped")
    refusal = "is a pickle of more than None, numbers and strings: it has a call of posix.mkdir"
    leading = tmp_path / "leading.txt"
    leading.write_text("val/heart-00009.jpg 1\n../../etc/passwd 0\n")
    links = tmp_path / "links"
    links.mkdir()
    (links / "a.jpg").symlink_to(drawn / "val/heart-00009.jpg")
    linked = links / "list.txt"
    linked.write_text("a.jpg 1\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cases = [
        (["--train", leading], f"{leading}:2: '../../etc/passwd' leads out of {drawn}; --allow-o"),
        (["--train", linked, "--root", links], f"{linked}:1: 'a.jpg' leads out of {links}; --al"),
        (["--train", pipe], f"{pipe}: expected a regular file, got a pipe or a device"),
        (["--mean", pipe], f"{pipe}: expected a regular file, got a pipe or a device"),
        (["--resume", strange], f"in {strange} {refusal}"),
        (["--initmodel", strange_model], f"in {strange_model} {refusal}"),
        (["--initmodel", strange_model, "--finetune"], f"in {strange_model} {refusal}"),
        (["--evaluate", strange_model], f"in {strange_model} {refusal}"),
        (["--resume", snapshot, "--arch", "nin"], f"{snapshot} does not fit"),
        (["--initmodel", model, "--arch", "nin"], f"{model} {other}"),
        (["--initmodel", model, "--arch", "nin", "--finetune"], f"{model} {other}"),
        (["--evaluate", model, "--arch", "nin"], f"{model} {other}"),
        (["--evaluate"], f"[Errno 2] No such file or directory: '{tmp_path}/result/best.npz'"),
        (["--train", absent], f"[Errno 2] No such file or directory: '{absent}'"),
        (["--val", relabeled], f"{relabeled} has images of class 12, but {drawn}/train.txt has"),
        (["--out", tmp_path / "trained", "--arch", "nin"], f"{tmp_path}/trained/snapshot_iter_45"),
        (["--freeze", "conv9"], "--freeze: there is no layer 'conv9', but bn1, bn2, "),
        (["--out", file / "result"], f"[Errno 20] Not a directory: '{file}/result'"),
    ]
    common = [*drawn_lists, "--out", tmp_path / "result", "--arch", "small", "--loaderjob", 0]
    runs = [[*common, *options] for options, _ in cases]
    jobs = run_in_turn(2, HERE / "train.py", runs, cwd=tmp_path)
    for (_, message), job in zip(cases, jobs, strict=True):
        assert job.returncode != 0, job
        assert job.stderr.count("error: ") == 1, job
        assert re.search(f"error: ('.*' )?{re.escape(message)}", job.stderr)
        assert "Traceback" not in job.stderr
    assert not (tmp_path / "trapped").exists()
    assert (tmp_path / "trained/model.json").read_text() == description


def test_same_without_workers_and_result_of_one_seed(two_ranks, train, drawn, tmp_path):
    job = train(2, drawn, tmp_path / "result", *SHORT, "--loaderjob", "0", "--quiet")
    assert job.stdout == ""
    assert_equal_models(tmp_path / "result", two_ranks[1])


def test_first_epochs_on_one_rank_with_other_options(train, drawn, tmp_path):
    options = ["--epoch", "1", "--schedule", "step", "--label-smoothing", "0", "--batchsize", "50"]
    train(1, drawn, tmp_path / "result", *options, "--loaderjob", "0", "--val_batchsize", "7")
    log = read_log(tmp_path / "result")
    assert log[-1]["iteration"] == 12
    # Continue with its weights, in float16 and with batch normalization over both ranks.
    model = tmp_path / "result/model.npz"
    options = ["--test", "--initmodel", model, "--mixed16", "--mnbn", "--communicator", "flat"]
    few = (drawn / "val.txt").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "few.txt").write_text("".join(few))  # float16 is slow on a CPU
    options += ["--val", tmp_path / "few.txt", "--loaderjob", "0", "--batchsize", "1"]
    train(2, drawn, tmp_path / "second", *options)
    log = read_log(tmp_path / "second/test")
    assert [row["iteration"] for row in log] == [10]
    assert np.isfinite(log[-1]["main/loss"])
    dtypes = {name: array.dtype for name, array in read_model(tmp_path / "second/test").items()}
    assert (dtypes["conv1/W"], dtypes["bn1/gamma"]) == (np.float16, np.float32)


@pytest.fixture
def damaged(drawn, tmp_path) -> Path:
    """Return a tenth of the data set, made of links, with one truncated file."""
    root = tmp_path / "damaged"
    root.mkdir()
    for name in ("train", "val"):
        lines = (drawn / f"{name}.txt").read_text().splitlines(keepends=True)
        (root / f"{name}.txt").write_text("".join(lines[::10]))
        (root / name).mkdir()
        for path in (drawn / name).iterdir():
            (root / name / path.name).symlink_to(path)
    victim = root / "train/circle-00110.jpg"
    content = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(content[:400])
    return root


def test_damaged_file_ends_the_job_or_is_skipped(train, damaged, tmp_path):
    options = ["--epoch", "1", "--batchsize", "30", "--loaderjob", "1", "--allow-outside"]
    job = train(2, damaged, tmp_path / "result", *options, fails=True)
    where = f"{damaged}/train/circle-00110.jpg ({damaged}/train.txt:12)"
    message = f"cannot read {where} on {socket.gethostname()} "
    (line,) = (line for line in job.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: {message}")
    assert re.search(r"--skip-unreadable continues .*\(rank [01] of 2 on .* ends the job\)$", line)
    assert "Traceback" not in job.stderr
    lists = ["--train", damaged / "train.txt", "--val", damaged / "val.txt", "--root", damaged]
    command = [HERE / "train.py", *lists, "--arch", "small", *options, "--skip-unreadable"]
    job = run_job(2, command, cwd=tmp_path, timeout=LIMIT)
    assert job.returncode == 0, job
    assert re.fullmatch(f"skipped: {re.escape(message)}.*\n", job.stderr)
    assert "images skipped in all epochs, as they could not be read: 1\n" in job.stdout
    assert "recognized after 1 epoch\n" in job.stdout


def test_all_ranks_end_where_a_host_lacks_the_images(train, drawn, tmp_path):
    options = ["--root", tmp_path]
    job = train(2, drawn, tmp_path / "result", *options, fails=True)
    missing = tmp_path / "train/circle-00000.jpg"
    assert f"host {socket.gethostname()} has no file {missing}" in job.stderr


@pytest.mark.parametrize("cwd", [REPOSITORY, HERE.parent])
def test_mpiexec_starts_the_script_itself(cwd, drawn, tmp_path):
    script = HERE.relative_to(cwd) / "train.py"
    np.save(tmp_path / "mean.npy", np.full((3, 5, 4), [[[10]], [[20.5]], [[30]]], np.float32))
    # As typed for the original's example.
    options = ["--test", "-a", "small", "-B", 8, "-b", 50, "-j", 0, "-E", 2, "-R", drawn]
    options += ["-m", tmp_path / "mean.npy", "-o", tmp_path / "result"]
    options += [drawn / "train.txt", drawn / "val.txt"]
    command = mpiexec_command(2, [script, *map(str, options)])
    command.remove(sys.executable)
    shown = subprocess.run(
        command,
        cwd=cwd,
        env=direct_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (shown.returncode, shown.stderr) == (0, ""), shown
    assert read_log(tmp_path / "result/test")[-1]["iteration"] == 10
    about = json.loads((tmp_path / "result/test/model.json").read_text())
    assert (about["mean"], about["deviation"]) == ([10, 20.5, 30], [255] * 3)


@pytest.mark.skipif(
    "CHAINERMN_LONG_TESTS" not in os.environ,
    reason="CHAINERMN_LONG_TESTS is not set: two cores would be busy for two minutes",
)
def test_drawn_images_are_recognized(start, tmp_path):
    job = start(2, "train.py", cwd=tmp_path)
    assert job.stdout.splitlines()[1].startswith("drawing 3499 images into")
    assert read_log(tmp_path / "result")[-1][ACCURACY] > 0.9
