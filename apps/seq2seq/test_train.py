"""Train on a few ranks and check what comes out."""

import gzip
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.optimizer_hooks import GradientClipping
from sacrebleu.metrics import BLEU, CHRF

import chainermn
from chainermn.datasets.stamps import Stamp
from chainermn.testing.mpiexec import run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
# Seconds after which ranks count as hung, even on a busy machine.
LIMIT = 600
EXACT = "validation/main/exact"
SCORES = [f"validation/main/{name}" for name in ("loss", "exact", "bleu", "chrf")]

SMALL = ("--unit", "16", "--batchsize", "42", "--hold-out", "43", "--epoch", "2")


def corpus_options(files: tuple[Path, Path]) -> list[str | Path]:
    return ["--source", files[0], "--target", files[1]]


# Training


@pytest.fixture(scope="module")
def train(app, call) -> Callable[..., str]:
    """Return a function that trains on all ranks, and returns what this rank prints."""

    def run(out: Path, *options: object, main: Callable = app.train.main) -> str:
        shown = call(main, "--out", out, *options)
        chainermn.create_communicator("naive").mpi_comm.Barrier()  # rank 0 has written its files
        return shown

    return run


@pytest.fixture(scope="module")
def train_alone(app, call) -> Callable[..., str]:
    """Return a function that trains on rank 0 only, and gives all ranks what it prints."""
    comm = chainermn.create_communicator("naive")
    alone = comm.split(comm.rank, 0)

    def run(out: Path, *options: object) -> str:
        shown = None
        if comm.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(chainermn, "create_communicator", lambda name: alone)
                shown = call(app.train.main, "--out", out, *options)
        return comm.bcast_obj(shown)

    return run


@pytest.fixture(scope="module")
def trained(app, train, folder) -> tuple[str, Path]:
    """Train with default data, but less of it."""
    out = folder / "result"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.corpus, "N_GENERATED", 400)
        return train(out, *SMALL, "--batchsize", "16", "--hold-out", "37", "--lr", "0.03"), out


@pytest.mark.nightly
def test_two_ranks_learn_to_read_dates(read_log, tmp_path):
    job = run_job(2, [HERE / "train.py", "--epoch", "1"], cwd=tmp_path, timeout=LIMIT).check()
    assert "20000 pairs to train on, 1000 to validate with, skipped: none" in job.stdout
    log = read_log(tmp_path / "result")
    assert [row["iteration"] for row in log] == [math.ceil(10000 / 64)]
    assert log[-1][EXACT] > 0.5  # the default, 6 epochs, reaches more than 0.98


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--mixed16"]], ids=["float32", "mixed16"])
def test_learns_on_a_gpu(precision, read_log, tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    options = ["--gpu", "--epoch", "1", *precision]
    run_job(1, [HERE / "train.py", *options], cwd=tmp_path, timeout=LIMIT).check()
    assert read_log(tmp_path / "result")[-1][EXACT] > 0.5


@pytest.mark.mpi(2, timeout=LIMIT)
def test_pictures_and_snapshots_are_written(trained, read_log):
    _, out = trained
    plots = ["attention.png", "exact.png", "loss.png", "ranks.png", "score.png"]
    others = ["best.json", "best.npz", "corpus", "log", "model.json", "model.npz", "run.json"]
    last = "snapshot_iter_24.0"
    others += ["snapshot_iter_12.0", last]
    assert sorted(path.name for path in out.glob("[!.]*")) == sorted([*plots, *others])
    for name in plots:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("best.npz", "model.npz", last):
        with zipfile.ZipFile(out / name) as archive:
            kinds = {member.compress_type for member in archive.infolist()}
        assert kinds == {zipfile.ZIP_STORED}, name
    assert all(row["tokens/s"] > 0 for row in read_log(out))


@pytest.mark.mpi(2, timeout=LIMIT)
def test_only_rank_0_prints_and_plainly_where_no_terminal_is(trained):
    shown, out = trained
    if chainermn.create_communicator("naive").rank > 0:
        assert shown == ""
        return
    first, *lines = [line for line in shown.splitlines() if line[:11] != "vocabulary:"]
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert lines[0] == "363 pairs to train on, 37 to validate with, skipped: none"
    assert re.fullmatch(r"vocabularies of \d+ and 15 tokens", lines[1])
    files = (f"{out}/corpus/dates-0.{side}" for side in ("source", "target"))
    assert lines[2] == f"from {' to '.join(files)}, for example:"
    assert all(re.fullmatch(r"  \S.*  ->  \d{4}-\d\d-\d\d", line) for line in lines[3:6])
    assert lines[6].split()[:2] == ["epoch", "main/loss"]
    assert [line.split()[0] for line in lines[7:9]] == ["1", "2"]
    assert len(lines[9:-4]) == 6  # an example of each batch
    assert re.fullmatch(r"\d+\.\d\d% of the validation data .*, loss \d\.\d{4}", lines[-4])
    assert re.fullmatch(r"BLEU \d+\.\d{4}, chrF \d+\.\d{4}", lines[-3])
    assert re.fullmatch(r"best.npz: loss \d\.\d{4} after epoch 2", lines[-2])
    assert lines[-1].startswith(f"curves, attention, log and networks: {out}/{{")
    assert "\033" not in shown


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize(
    ("options", "beam", "batchsize"), [(["--beam", "3", "--batchsize", "10"], 3, 10), ([], 1, 1)]
)
def test_translate(app, call, trained, dates, options, beam, batchsize):
    weights = trained[1] / "best.npz"
    lines = dates[0].read_text("utf-8").splitlines()[:11]
    text = "\n".join([*lines, "", ""])
    *shown, empty = call(app.translate.main, weights, *options, text=text).splitlines()
    assert empty == ""
    network, source, target, _ = app.saved.load_network(weights)
    wanted = []
    for start in range(0, 11, batchsize):
        xs = app.batches.pad([source.encode(line) for line in lines[start : start + batchsize]])
        wanted += [target.decode(row.tolist()) for row in network.translate(xs, beam)]
    assert shown == wanted
    assert len(set(shown)) > 5


@pytest.mark.mpi(2, timeout=LIMIT)
def test_network_of_a_stranger_runs_nothing(app, error_of, trained, tmp_path):
    message = error_of(app.translate.main, tmp_path / "best.npz")
    assert re.match(r"error: there is no trained network .*best.npz: train first", message)
    set_traps(trained[1] / "best.npz", tmp_path / "best.npz", tmp_path / "trapped")
    message = error_of(app.translate.main, tmp_path / "best.npz")
    assert re.match(r"error: there is no .*model.json: train.py writes it beside the", message)
    shutil.copy(trained[1] / "model.json", tmp_path)
    message = error_of(app.translate.main, tmp_path / "best.npz")
    assert re.match(r"error: .* in .*best\.npz is a pickle of more than", message)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.mpi(3, timeout=LIMIT)
def test_scores_are_equal_on_1_and_3_ranks_and_in_sacrebleu(app, dates, shared_tmp_path):
    """Evaluate one network on 1 and 3 ranks, and its translations with sacreBLEU itself."""
    comm = chainermn.create_communicator("naive")
    corpus, _ = app.corpus.load_corpus(dates, shared_tmp_path, app.corpus.Settings(), 0, comm)
    sizes = {"n_units": 16, "n_layers": 1, "share_embedding": False}
    np.random.seed(0)
    network = app.saved.create(app.saved.describe("lstm", sizes, corpus))
    source, target = corpus.vocabularies
    decode = target.decode
    # Every third translation is right, except for the kind and number of its spaces.
    lines = [path.read_text("utf-8").splitlines()[:47] for path in dates]
    xs = app.batches.pad([source.encode(line) for line in lines[0][::3]])
    right = [decode(row.tolist()) for row in network.translate(xs)]
    lines[1][::3] = [line.replace(" ", "\u00a0 ") for line in right]
    files = shared_tmp_path / "a.source", shared_tmp_path / "a.target"
    if comm.rank == 0:
        for path, content in zip(files, lines, strict=True):
            path.write_text("\n".join(content), "utf-8")
    corpus, index = app.corpus.load_more(files, shared_tmp_path, corpus, comm)
    device, batches = chainer.get_device("@numpy"), None
    alone = comm.split(comm.rank, 0)
    if comm.rank == 0:
        batches = app.batches.cut_batches(index, 10)
        evaluator = app.evaluation.TranslationEvaluator(alone, batches, corpus, network, device)
        scores = evaluator(None)
    own = chainermn.scatter_dataset(batches, comm, shuffle=True, seed=0, force_equal_length=False)
    assert sorted(comm.allgather_obj(len(own))) == [1, 2, 2]
    found = app.evaluation.TranslationEvaluator(comm, own, corpus, network, device)(None)
    if comm.rank > 0:
        return
    assert found == scores
    translations, references = [], []
    for rows in batches:
        text = app.corpus.ParallelText(corpus, rows)
        xs = app.batches.pad([source for source, _ in text])
        translations += [decode(row.tolist()) for row in network.translate(xs)]
        references += [text.get_lines(i)[1] for i in range(len(text))]
        text.close()
    assert len(translations) == 47
    assert scores["validation/main/bleu"] == BLEU().corpus_score(translations, [references]).score
    assert scores["validation/main/chrf"] == CHRF().corpus_score(translations, [references]).score
    pairs = list(zip(translations, references, strict=True))
    assert scores[EXACT] == sum(one.split() == other.split() for one, other in pairs) / 47
    assert scores[EXACT] > sum(one == other for one, other in pairs) / 47
    assert 0 < scores[EXACT] < 0.5
    assert 0 < scores["validation/main/bleu"] < 100


@pytest.mark.each_mpi
@pytest.mark.mpi(3, timeout=LIMIT)
def test_three_ranks_end_together_with_an_odd_corpus(
    app, read_log, dates, shared_tmp_path, capfd, monkeypatch
):
    options = ["--out", shared_tmp_path, *corpus_options(dates), *SMALL, "--quiet"]
    with open(1, "w", closefd=False) as stream:  # pytest's own does not use the descriptor
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        app.train.main(list(map(str, options)))
        print("after")
    chainermn.create_communicator("naive").mpi_comm.Barrier()  # rank 0 has written its files
    assert capfd.readouterr().out == "before\n"
    # Of 203 pairs, 43 are held out; each rank gets 54 of the other 160.
    assert [row["iteration"] for row in read_log(shared_tmp_path)] == [2, 4]


@pytest.mark.mpi(2, timeout=LIMIT)
def test_gzipped_text_and_other_options(read_log, train, app, dates, shared_tmp_path):
    packed = tuple(shared_tmp_path / f"{path.name}.gz" for path in dates)
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        for path, plain in zip(packed, dates, strict=True):
            path.write_bytes(gzip.compress(plain.read_bytes()))
    options = [*SMALL, "--epoch", "1", "--share-embedding", "--layer", "2"]
    out = shared_tmp_path / "result"
    train(out, *corpus_options(packed), *options, "--optimizer", "rmsprop")
    assert read_log(out)[-1]["iteration"] == math.ceil(160 / 2 / 42)
    corpus, _ = app.corpus.load_corpus(packed, shared_tmp_path, app.corpus.Settings(), 0, comm)
    for stamp, plain in zip(corpus.stamps, dates, strict=True):
        assert stamp.path.read_bytes() == plain.read_bytes()


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize(
    # apps/test_stopping.py resumes an LSTM.
    "kind",
    [pytest.param("lstm", marks=pytest.mark.nightly), "transformer"],
)
def test_run_that_goes_on_is_as_one_never_interrupted(
    read_log, train, dates, shared_tmp_path, kind
):
    options = [*corpus_options(dates), *SMALL, "--model", kind, "--tensorboard"]
    straight, resumed = shared_tmp_path / "straight", shared_tmp_path / "resumed"
    train(straight, *options)
    assert "resuming after" not in train(resumed, *options, "--epoch", "1")
    first = (resumed / "model.npz").read_bytes()
    is_root = chainermn.create_communicator("naive").rank == 0
    shown = train(resumed, *options)
    said = f"resuming after iteration 2, epoch 1, from {resumed}/snapshot"
    assert (said in shown) == is_root
    for key in ("epoch", "iteration", "main/loss", "lr", *SCORES):
        assert [row[key] for row in read_log(resumed)] == [row[key] for row in read_log(straight)]
    last, wanted = (load(out / "model.npz") for out in (resumed, straight))
    for name in wanted:
        np.testing.assert_array_equal(last[name], wanted[name], err_msg=name)
    assert first != (resumed / "model.npz").read_bytes()
    assert any((resumed / "tensorboard").iterdir())


@pytest.mark.mpi(2, timeout=LIMIT)
def test_other_ways_to_go_on(
    app, read_log, refused, train, train_alone, dates, shared_tmp_path, capsys
):
    out = shared_tmp_path / "result"
    is_root = chainermn.create_communicator("naive").rank == 0
    options = [*corpus_options(dates), *SMALL]
    train_alone(out, *options)
    if is_root:
        (out / "attention.png").unlink()  # as if it had been killed just before it was drawn
    shown = train_alone(out, *options)  # nothing is left to do
    assert ("resuming after iteration 8" in capsys.readouterr().err) == is_root
    files = re.search(r"networks: .*/\{(.*)\}\n", shown)[1].split(",")
    assert "log" in files and all((out / name).exists() for name in files)
    assert f"exactly, loss {read_log(out)[-1]['validation/main/loss']:.4f}\n" in shown
    # More epochs, on another number of ranks.
    assert ("resuming after iteration 8" in train(out, *options, "--epoch", "3")) == is_root
    assert [row["epoch"] for row in read_log(out)] == [1, 2, 3]
    # A named snapshot is resumed with other options; without --resume, they are an error.
    options += ["--lr", "0.1"]
    shown = train_alone(out, *options, "--resume", out / "snapshot_iter_4.0")
    assert "resuming after iteration 4, epoch 1" in shown
    log = read_log(out)
    shown = refused(app.train.main, "--out", out, *options, "--seed", "1", "--epoch", "1")
    assert re.search(r"error: .* with other settings \(.*seed: 0, now 1", shown)
    assert read_log(out) == log


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as content:
        return dict(content)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_best_network_is_that_of_the_criterion(
    read_log, train, train_alone, dates, shared_tmp_path
):
    out = shared_tmp_path / "result"
    is_root = chainermn.create_communicator("naive").rank == 0
    options = [*corpus_options(dates), *SMALL, "--criterion", "chrf", "--lr", "0.1"]
    options += ["--warmup", "0"]
    train(out, *options, "--epoch", "3")
    chrf = [row["validation/main/chrf"] for row in read_log(out)]
    best = json.loads((out / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("validation/main/chrf", max(chrf))
    assert best["epoch"] == chrf.index(max(chrf)) + 1 > 1
    files = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    for evaluate, options, epoch in (
        (train_alone, ["--evaluate"], best["epoch"]),
        (train, ["--evaluate", out / "model.npz"], 3),
    ):
        shown = evaluate(out, *corpus_options(dates), *SMALL, *options)
        row = read_log(out)[epoch - 1]
        bleu, chrf = row["validation/main/bleu"], row["validation/main/chrf"]
        assert f"BLEU {bleu:.4f}, chrF {chrf:.4f}\n" in shown or not is_root
        assert files == {path: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_float16_learns_as_float32_does(
    read_log, train, train_alone, dates, shared_tmp_path, kind
):
    mixed16, float32 = shared_tmp_path / "mixed", shared_tmp_path / "wide"
    options = [
        *corpus_options(dates),
        *SMALL,
        "--model",
        kind,
        "--batchsize",
        "30",
        "--epoch",
        "1",
    ]
    train(float32, *options)
    train(mixed16, *options, "--mixed16")
    for mixed, wide in zip(*map(read_log, (mixed16, float32)), strict=True):
        for name in ("main/loss", "validation/main/loss"):
            assert mixed[name] == pytest.approx(wide[name], rel=0.02)
            assert mixed[name] != wide[name]
    assert {array.dtype for array in load(mixed16 / "best.npz").values()} == {np.dtype("e")}
    shown = train_alone(mixed16, *options, "--mixed16", "--evaluate")
    (loss,) = re.findall(r"loss (\d\.\d{4})", shown)
    assert float(loss) == pytest.approx(mixed["validation/main/loss"], abs=1e-3)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_files_to_validate_with(read_log, train, dates, shared_tmp_path):
    lines = [path.read_text("utf-8").splitlines(keepends=True) for path in dates]
    others = shared_tmp_path / "a.source", shared_tmp_path / "a.target"
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        for path, content in zip(others, lines, strict=True):
            path.write_text("".join([*content[:20], "\n", "word " * 60 + "\n"]), "utf-8")
    validation = ["--validation-source", others[0], "--validation-target", others[1]]
    out = shared_tmp_path / "result"
    shown = train(out, *corpus_options(dates), *SMALL, *validation, "--epoch", "1")
    if comm.rank == 0:
        assert "203 pairs to train on, 20 to validate with, skipped: none\n" in shown
        assert "skipped of those to validate with: 1 empty, 1 too long\n" in shown
        assert "unknown tokens of those to validate with: 0.0% and 0.0%\n" in shown
    assert read_log(out)[-1]["iteration"] == math.ceil(203 / 2 / 42)
    assert read_log(out)[-1][EXACT] * 20 % 1 == 0


@pytest.fixture
def during_training(app, monkeypatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that lets rank 0 do something before its second batch."""

    def run(act: Callable[[], object]) -> None:
        read = app.batches.BucketIterator.__next__

        def act_and_read(batches: object) -> list:
            if batches.position == 1 and chainermn.create_communicator("naive").rank == 0:
                act()
            return read(batches)

        monkeypatch.setattr(app.batches.BucketIterator, "__next__", act_and_read)

    return run


@pytest.mark.mpi(2, timeout=LIMIT)
@pytest.mark.parametrize("is_removed", [True, False])
def test_files_that_change_end_the_job_before_the_evaluation(
    app, dates, during_training, is_removed, refused, shared_tmp_path
):
    comm = chainermn.create_communicator("naive")
    files = comm.bcast_obj([shared_tmp_path / path.name for path in dates])
    others = shared_tmp_path / "a.source", shared_tmp_path / "a.target"
    if comm.rank == 0:
        for paths in (files, others):
            for path, content in zip(paths, dates, strict=True):
                shutil.copy(content, path)
    comm.mpi_comm.Barrier()

    def change() -> None:
        if is_removed:
            others[1].unlink()
        else:  # those who have it open read the old one
            (shared_tmp_path / "new").write_text("text\n")
            (shared_tmp_path / "new").replace(files[0])

    during_training(change)
    out = shared_tmp_path / "result"
    options = ["--validation-source", others[0], "--validation-target", others[1]]
    shown = refused(app.train.main, *corpus_options(files), *SMALL, *options, "--out", out)
    if is_removed:
        assert (
            f"gone since the index was made: put it back, and start again: '{others[1]}'" in shown
        )
    else:
        assert f"{files[0]} has changed since the index was made (" in shown
    assert not [*out.glob("snapshot_*"), *out.glob("*.npz")]


@pytest.mark.parametrize("change", ["cut", "rewritten"])
def test_text_that_changes_ends_the_job_at_the_next_line(
    app, dates, during_training, error_of, change, tmp_path
):
    files = [tmp_path / path.name for path in dates]
    for path, content in zip(files, dates, strict=True):
        shutil.copy(content, path)
    if change == "cut":
        during_training(lambda: os.truncate(files[1], 9))
    else:
        during_training(lambda: files[1].write_text(files[1].read_text() + "text\n"))
    shown = error_of(app.train.main, *corpus_options(files), *SMALL, "--out", tmp_path / "result")
    assert shown.startswith(f"error: {files[1]} has changed since the index was made (")
    assert not list((tmp_path / "result").glob("snapshot_*"))


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_stops_without_progress(read_log, train, dates, shared_tmp_path):
    """It learns too slowly for a right translation, so the rate falls after epochs 2 and 3."""
    comm, out = chainermn.create_communicator("naive"), shared_tmp_path / "result"
    options = [*corpus_options(dates), *SMALL, "--criterion", "exact", "--lr", "1e-6"]
    options += ["--patience", "2", "--epoch", "9"]
    rates = [1e-6, 5e-7, 2.5e-7]
    train(out, *options)
    assert [row["lr"] for row in read_log(out)] == rates
    # A restart ends in the same epoch, even if the job had been killed earlier.
    killed = shared_tmp_path / "killed"
    if comm.rank == 0:
        shutil.copytree(out, killed, ignore=shutil.ignore_patterns("snapshot_iter_6.0"))
        assert len(list(killed.glob("snapshot_iter_*"))) == 2
    comm.mpi_comm.Barrier()
    for folder in (out, killed):
        assert ("resuming after" in train(folder, *options)) == (comm.rank == 0)
        assert [row["lr"] for row in read_log(folder)] == rates


class Alone:
    """A communicator of one rank."""

    rank = 0

    def bcast_obj(self, value: float) -> float:
        return value


@pytest.mark.parametrize(
    ("criterion", "values"),
    [
        ("loss", (3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5)),
        ("bleu", (0.0, 2.0, 1.5, 2.0, 3.0, 2.5, 2.5, 2.5, 2.5)),
    ],
)
def test_rates_fall_without_progress(app, criterion, values):
    rate = app.training.LearningRate(Alone(), "lr", 1.0, 0, 0.5, 2, criterion)
    rates = []
    for value in values:
        rate.observe(value)
        rates.append(rate.rate)
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_rates_rise_at_the_start(app):
    rate = app.training.LearningRate(Alone(), "lr", 2.0, 4, 0.5, 2, "loss")
    optimizer = SimpleNamespace(lr=None)
    updater = SimpleNamespace(
        iteration=0, is_new_epoch=False, get_optimizer=lambda name: optimizer
    )
    trainer = SimpleNamespace(updater=updater)
    rate.initialize(trainer)
    rates = [optimizer.lr]
    for updater.iteration in range(1, 6):
        rate(trainer)
        rates.append(optimizer.lr)
    assert rates == [0.5, 1, 1.5, 2, 2, 2]


def reference(app, out: Path, files: tuple[Path, Path], n_shards: int, epochs: int):
    """Train an LSTM in one process, by plain Chainer, on the batches of all shards.

    Return the network and its optimizer. With several shards, its first update does nothing: that
    of a multi-node optimizer makes the parameters of all ranks equal.
    """
    (description,), (index,) = (out.glob(f"corpus/{name}-*") for name in ("vocabulary", "index"))
    found = json.loads(description.read_text(encoding="utf-8"))
    vocabularies = tuple(map(app.vocabulary.Vocabulary, found["vocabularies"]))
    stamps = tuple(map(Stamp.of, files))
    corpus = app.corpus.Corpus(stamps, vocabularies, 203, "", {}, app.corpus.Settings())
    rows, _ = app.batches.hold_out(np.load(index), 43, 0)
    assert len(rows) % n_shards == 0
    np.random.seed(0)
    network = app.models.MODELS["lstm"](*map(len, vocabularies), 16)
    optimizer = chainer.optimizers.SGD(lr=2).setup(network)
    optimizer.add_hook(GradientClipping(0.1))
    shards = [
        app.batches.BucketIterator(app.corpus.ParallelText(corpus, part), 32, 0)
        for part in np.split(rows, n_shards)
    ]
    moves = n_shards == 1
    while shards[0].epoch < epochs:
        network.cleargrads()
        for shard in shards:
            xs, ys = map(app.batches.pad, zip(*next(shard), strict=True))
            (network.loss(xs, ys) / n_shards).backward()
        if moves:
            optimizer.update()
        moves = True
    for shard in shards:
        shard.finalize()
    return network, optimizer


def check_weights(app, path: Path, wanted: chainer.Link) -> None:
    found = load(path)
    assert len(found) == len(list(wanted.params()))
    for name, parameter in wanted.namedparams():
        got = found[name.removeprefix("/")]
        np.testing.assert_allclose(got, parameter.array, rtol=1e-3, atol=1e-4, err_msg=name)


EXACTLY = ("--batchsize", "32", "--dropout", "0", "--optimizer", "sgd", "--lr", "2")
EXACTLY += ("--clip", "0.1", "--warmup", "0")


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_is_that_of_one_process_with_all_batches(
    read_log, train, app, dates, shared_tmp_path
):
    out = shared_tmp_path / "result"
    train(out, *corpus_options(dates), *SMALL, *EXACTLY, "--epoch", "1")
    if chainermn.create_communicator("naive").rank == 0:
        network, optimizer = reference(app, out, dates, n_shards=2, epochs=1)
        assert read_log(out)[-1]["iteration"] == optimizer.t + 1 == 3
        check_weights(app, out / "model.npz", network)


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_model_parallel_training_is_that_of_one_process(
    read_log, train, train_alone, app, dates, shared_tmp_path
):
    out, main = shared_tmp_path / "result", app.train_model_parallel.main
    options = [*corpus_options(dates), *SMALL, *EXACTLY]
    train(out, *options, "--epoch", "1", main=main)
    shown = train(out, *options, main=main)
    evaluated = train_alone(out, *options, "--evaluate", out / "model.npz")
    if chainermn.create_communicator("naive").rank > 0:
        assert shown == ""
        return
    assert "resuming after iteration 5, epoch 1" in shown
    assert shown.startswith("ranks: 2, hosts: 1, communicator: SingleNodeCommunicator\n")
    network, optimizer = reference(app, out, dates, n_shards=1, epochs=2)
    check_weights(app, out / "model.npz", network)
    last = read_log(out)[-1]
    assert last["iteration"] == optimizer.t == 10
    assert f"BLEU {last['validation/main/bleu']:.4f}, " in evaluated
    assert last["validation/main/bleu"] > 0


@pytest.fixture
def described(app, tmp_path) -> dict:
    """Write a small network, and return its description."""
    tokens = ["<eos>", "<unk>", "▁a", "▁b"]
    sizes = {"n_units": 8, "n_layers": 1, "share_embedding": False}
    about = {"model": "lstm", "sizes": sizes, "subwords": False, "vocabularies": [tokens] * 2}
    chainer.serializers.save_npz(tmp_path / "best.npz", app.saved.create(about))
    (tmp_path / "model.json").write_text(json.dumps(about))
    return about


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "'model': expected one of lstm, transformer, got 'other'"),
        ({"model": "transformer"}, "'sizes': 'n_heads' is missing"),
        ({"sizes": {}}, "'sizes': 'n_units' is missing"),
        ({"n_units": 10**12}, "'sizes': 'n_units': expected an integer from 1 to 65535"),
        ({"n_units": True}, "'sizes': 'n_units': expected an integer from 1 to 65535, got True"),
        ({"n_units": 8000}, "at most saved.MOST_WEIGHTS = 1000000000, got 1216096000"),
        ({"n_layers": 0}, "'sizes': 'n_layers': expected an integer from 1 to 1023, got 0"),
        ({"share_embedding": 1}, "'sizes': 'share_embedding': expected true or false, got 1"),
        ({"vocabularies": [[], []]}, "expected a vocabulary that begins with <eos>, <unk>, got"),
        ({"vocabularies": [["<eos>"], 3]}, "'vocabularies'[1]: expected a list, got 3"),
        ({"subwords": None}, "'subwords': expected true or false, got None"),
        ({"normalization": "NFD"}, "'normalization': expected one of NFC, got 'NFD'"),
    ],
)
def test_description_of_something_else(app, described, change, message, tmp_path):
    for key, value in change.items():
        place = described["sizes"] if key in described["sizes"] else described
        place[key] = value
    path = tmp_path / "model.json"
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        app.saved.load_network(tmp_path / "best.npz")
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "transformer"])
@pytest.mark.parametrize("shared", [False, True])
def test_weights_of_a_smaller_network(
    app, described, monkeypatch, tmp_path, kind, objects, shared
):
    described["model"], sizes = kind, described["sizes"]
    sizes |= {"n_units": 64, "n_layers": 2, "share_embedding": shared, "n_heads": 2}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(described))
    described = app.saved.read_description(path)
    chainer.serializers.save_npz(tmp_path / "best.npz", app.saved.create(described))
    app.saved.load_network(tmp_path / "best.npz")
    sizes["n_units"] = 66
    path.write_text(json.dumps(described | {"sizes": sizes}))
    if objects:
        about = {"descr": "|O", "fortran_order": False, "shape": (10**9,)}
        with (
            zipfile.ZipFile(tmp_path / "best.npz", "a") as file,
            file.open("more.npy", "w") as more,
        ):
            np.lib.format.write_array_header_1_0(more, about)
            pickle.dump(np.array([None]), more)
    monkeypatch.setattr(app.saved, "create", pytest.fail)
    with pytest.raises(
        ValueError, match=r"best\.npz has \d+ weights, the network of model\.json "
    ):
        app.saved.load_network(tmp_path / "best.npz")


def test_shared_embedding_of_two_vocabularies(app, described, tmp_path):
    described["sizes"]["share_embedding"] = True
    described["vocabularies"][1] = [*described["vocabularies"][0], "▁c"]
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="expected one vocabulary for a shared embedding, got tw"):
        app.saved.load_network(tmp_path / "best.npz")


def test_lines_that_are_too_long_to_translate(app, call, error_of, described, tmp_path):
    weights = tmp_path / "best.npz"
    text = "a\n" + "b".ljust(4999) + "\na\n"
    shown = call(app.translate.main, weights, text=text)
    assert shown.count("\n") == 3
    text = "a\n" + "b".ljust(5000) + "\na\n"
    shown = error_of(app.translate.main, weights, text=text)
    assert shown == "error: standard input:2: expected a line of at most 5000 bytes"
    (tmp_path / "long").write_text(text)
    options = ["--source", tmp_path / "long", "--target", tmp_path / "long"]
    shown = error_of(app.evaluate.main, weights, *options)
    assert shown == f"error: {tmp_path}/long:2: expected a line of at most 5000 bytes"


def test_reader_of_translations_may_leave(described, tmp_path):
    """As ``translate.py | head`` does."""
    command = [sys.executable, Path(__file__).with_name("translate.py"), tmp_path / "best.npz"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("a\n" * 9, timeout=LIMIT)
    assert (errors, process.returncode) == ("", -signal.SIGPIPE)


def test_odd_text_to_translate(app, call, error_of, described, tmp_path, capsys):
    """Gzipped, with byte order marks, letters in two parts, and lines that are not UTF-8."""
    weights, translate = tmp_path / "best.npz", app.translate.main
    wanted = call(translate, weights, text="a\nb\n").splitlines()
    content = "\ufeffa\n".encode() + b"\xff\n\n" + "\ufeffb\r\n".encode()
    for text in (content, gzip.compress(content)):
        shown = call(translate, weights, "--batchsize", "2", text=text)
        assert shown.split("\n") == [wanted[0], "", "", wanted[1], ""]
        said = (
            "standard input:2: not UTF-8 (1 of 4 lines, which are left out). If this is Latin-1: "
        )
        assert capsys.readouterr().err.startswith(said)
    shown = error_of(translate, weights, text="a\n".encode("utf-16"))
    assert shown.startswith("error: standard input:1: expected text in UTF-8, got UTF-16")


def test_older_network_is_evaluated_on_letters_as_it_knows_them(app, call, tmp_path):
    """What its description says, or does not say, decides; and terminals are not controlled."""
    files = tmp_path / "source", tmp_path / "target"
    for file in files:
        file.write_text("u\u0308\x07\u200cb\n" * 4, "utf-8")
    settings, comm = (
        app.corpus.Settings(normalization=None),
        chainermn.create_communicator("naive"),
    )
    corpus, _ = app.corpus.load_corpus(files, tmp_path, settings, 0, comm)
    sizes = {"n_units": 8, "n_layers": 1, "share_embedding": False}
    about = app.saved.describe("lstm", sizes, corpus)
    del about["normalization"]
    (tmp_path / "model.json").write_text(json.dumps(about))
    weights = tmp_path / "best.npz"
    chainer.serializers.save_npz(weights, app.saved.create(about))
    options = [*corpus_options(files), "--unit", "8", "--hold-out", "1", "--evaluate", weights]
    shown = call(app.train.main, *options, "--out", tmp_path)
    assert "\n  u\u0308\\x07\u200cb  ->  u\u0308\\x07\u200cb\n" in shown
    assert "instead of  u\u0308\\x07\u200cb\n" in shown


def test_odd_text_to_evaluate(app, call, error_of, described, tmp_path):
    files = tmp_path / "source", tmp_path / "target"
    files[0].write_bytes("\ufeffu\u0308 a ?\nb\n".encode() + b"\xff\na b\n")
    files[1].write_bytes("ü\u00a0 a\u202f?\n".encode() + b"\xff\nc\nb a\n")
    options = ["--source", files[0], "--target", files[1], "--out", tmp_path / "scores"]
    weights = tmp_path / "best.npz"
    for normalization, exact in (("NFC", 0.5), (None, 0)):
        about = {**described, "normalization": normalization}
        if normalization is None:
            del about["normalization"]  # as in older networks, which know letters in two parts
        (tmp_path / "model.json").write_text(json.dumps(about))
        shown = call(app.evaluate.main, weights, *options)
        said = [
            f"{file}:{line}: not UTF-8 (1 of 4 " for file, line in zip(files, (3, 2), strict=True)
        ]
        assert all(map(str.startswith, shown.splitlines(), said))
        assert "\n2 sentences " in shown
        scores = json.loads((tmp_path / "scores").read_text())
        assert scores["copy of the source"]["exact"] == exact
    files[0].write_text("a\nb\n", "utf-16")
    shown = error_of(app.evaluate.main, weights, *options)
    assert shown.startswith(f"error: {files[0]}:1: expected text in UTF-8, got UTF-16")


@pytest.mark.mpi(2, timeout=LIMIT)
def test_every_rank_ends_with_one_clear_error(app, refused, train, dates, shared_tmp_path):
    folder = shared_tmp_path
    other, damaged = folder / "other", folder / "damaged.gz"
    train(other, *corpus_options(dates), *SMALL, "--max-vocabulary", "30", "--epoch", "1")
    snapshot = next(other.glob("snapshot_iter_*.0"))
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        damaged.write_bytes(gzip.compress(dates[0].read_bytes())[:-30])
        (folder / "empty").touch()
        (folder / "wide").write_text("a\nb\n", "utf-16")
        os.mkfifo(folder / "pipe")
        (folder / "hole").touch()
        os.truncate(folder / "hole", 1 << 40)
        set_traps(snapshot, folder / "strange.0", folder / "trapped")
        set_traps(other / "best.npz", folder / "strange.npz", folder / "trapped")
    comm.mpi_comm.Barrier()
    strange, strange_model = folder / "strange.0", folder / "strange.npz"
    source = comm.bcast_obj(dates[0])
    for files, options, message in [
        ((folder / "absent", dates[1]), [], "No such file or directory: '.*absent'"),
        ((damaged, dates[1]), [], "damaged.gz: damaged gzip file"),
        ((folder / "wide", dates[1]), [], "wide:1: expected text in UTF-8, got UTF-16"),
        ((dates[0], folder / "pipe"), [], "pipe: expected a regular file, got a pipe or a device"),
        ((folder / "hole", dates[1]), [], "hole:1: expected text in UTF-8, got NUL bytes"),
        (dates, ["--subwords", damaged], "damaged.gz is not a model of subwords"),
        (dates, ["--subwords", folder / "empty"], "empty is not a model of subwords"),
        (dates, ["--resume", snapshot], f"{snapshot} does not fit"),
        (dates, ["--resume", strange], f"{strange} is a pickle of more than None, numbers and"),
        (dates, ["--evaluate", strange_model], f"{strange_model} is a pickle of more than None"),
        (dates, ["--resume", source], f"{source} is not an NPZ file"),
        (dates, ["--evaluate", source], "dates.source is not an NPZ file"),
        (
            dates,
            ["--evaluate", other / "best.npz"],
            "was trained on other text, or with other opt",
        ),
        (dates, ["--evaluate"], "there is no trained network .*best.npz: train first"),
        (dates, ["--model", "transformer", "--unit", "10"], "got 10 units and 4 heads"),
        (dates, ["--validation-target", dates[1]], "source and --validation-target belong tog"),
        (dates, ["--hold-out", "0"], "--hold-out must be a positive number, got 0"),
        (dates, ["--dropout", "1"], "--dropout must be .* less than 1, got 1"),
    ]:
        options = ["--out", folder / "result", *corpus_options(files), *SMALL, *options]
        assert re.search(f"error: .*{message}", refused(app.train.main, *options))
    assert not (folder / "trapped").exists()


@pytest.mark.mpi(3, timeout=LIMIT)
def test_model_parallel_training_takes_two_ranks(app, refused, dates, shared_tmp_path):
    options = ["--out", shared_tmp_path, *corpus_options(dates), *SMALL]
    shown = refused(app.train_model_parallel.main, *options)
    assert shown == "error: this script takes two ranks, got 3"
