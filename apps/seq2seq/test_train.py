"""Train on a few ranks and check what comes out."""

import gzip
import json
import math
import os
import pickle
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.optimizer_hooks import GradientClipping
from sacrebleu.metrics import BLEU, CHRF

from chainermn.testing.in_turn import run_in_turn
from chainermn.testing.mpiexec import JobResult
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
EXACT = "validation/main/exact"
SCORES = [f"validation/main/{name}" for name in ("loss", "exact", "bleu", "chrf")]

SMALL = ("--unit", "16", "--batchsize", "8", "--hold-out", "37", "--epoch", "2")


def corpus_options(files: tuple[Path, Path]) -> list[str | Path]:
    return ["--source", files[0], "--target", files[1]]


# Training


@pytest.fixture(scope="module")
def two_ranks(train, tmp_path_factory) -> tuple[JobResult, Path]:
    out = tmp_path_factory.mktemp("two_ranks") / "result"
    return train(2, out, "--epoch", "1"), out


def test_two_ranks_learn_to_read_dates(read_log, two_ranks):
    _, out = two_ranks
    log = read_log(out)
    assert [row["iteration"] for row in log] == [math.ceil(10000 / 64)]
    assert log[-1][EXACT] > 0.5  # the default, 6 epochs, reaches more than 0.98
    assert log[-1]["tokens/s"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [[], ["--mixed16"]], ids=["float32", "mixed16"])
def test_learns_on_a_gpu(precision, read_log, train, tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    out = tmp_path / "result"
    train(1, out, "--gpu", "--epoch", "1", *precision)
    assert read_log(out)[-1][EXACT] > 0.5


def test_pictures_and_snapshots_are_written(two_ranks):
    _, out = two_ranks
    plots = ["attention.png", "exact.png", "loss.png", "ranks.png", "score.png"]
    others = ["best.json", "best.npz", "corpus", "log", "model.json", "model.npz", "run.json"]
    others.append("snapshot_iter_157.0")
    assert sorted(path.name for path in out.iterdir()) == sorted([*plots, *others])
    for name in plots:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("best.npz", "model.npz", "snapshot_iter_157.0"):
        with zipfile.ZipFile(out / name) as archive:
            kinds = {member.compress_type for member in archive.infolist()}
        assert kinds == {zipfile.ZIP_STORED}, name


def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    job, out = two_ranks
    first, *lines = [line for line in job.stdout.splitlines() if line[:11] != "vocabulary:"]
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert lines[0] == "20000 pairs to train on, 1000 to validate with, skipped: none"
    assert re.fullmatch(r"vocabularies of \d+ and 15 tokens", lines[1])
    assert lines[2].split()[:2] == ["epoch", "main/loss"]
    assert lines[3].split()[0] == "1"
    assert len(lines[4:-4]) == 8
    assert re.fullmatch(r"\d\d\.\d\d% of the validation data .*, loss 0\.\d{4}", lines[-4])
    assert re.fullmatch(r"BLEU \d\d\.\d{4}, chrF \d\d\.\d{4}", lines[-3])
    assert re.fullmatch(r"best.npz: loss 0\.\d{4} after epoch 1", lines[-2])
    assert lines[-1].startswith(f"curves, attention, log and networks: {out}/{{")
    assert "\033" not in job.stdout


def test_translate(run_script, two_ranks, dates):
    _, out = two_ranks
    lines, wanted = ([*path.read_text("utf-8").splitlines()[:60], ""] for path in dates)
    for options in (["--beam", "3", "--batchsize", "25"], []):
        shown = run_script(
            "translate.py", out / "best.npz", *options, text="\n".join(["", *lines])
        )
        empty, *found = shown.splitlines()
        assert empty == ""
        assert len(found) == 60
        assert sum(map(str.__eq__, found, wanted)) > 0.4 * 60


def test_network_of_a_stranger_runs_nothing(app, two_ranks, monkeypatch, tmp_path):
    set_traps(two_ranks[1] / "best.npz", tmp_path / "best.npz", tmp_path / "trapped")
    shutil.copy(two_ranks[1] / "model.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["translate.py", str(tmp_path / "best.npz")])
    with pytest.raises(SystemExit, match=r"^error: .* in .*best\.npz is a pickle of more than"):
        app.translate.main()
    assert not (tmp_path / "trapped").exists()


def test_scores_are_equal_on_1_and_3_ranks_and_in_sacrebleu(start, two_ranks, tmp_path):
    """Evaluate one network on 1 and 3 ranks, and its translations with sacreBLEU itself."""
    _, out = two_ranks
    script = tmp_path / "evaluate.py"
    script.write_text(EVALUATE)
    found = []
    for ranks in (1, 3):
        found.append(json.loads(start(ranks, script, HERE, out, cwd=tmp_path).stdout))
    assert found[0]["scores"] == found[1]["scores"]
    assert found[0]["batches"] == [10]
    assert sorted(found[1]["batches"]) == [3, 3, 4]
    pairs = found[0]["pairs"]
    translations, references = [t for t, _ in pairs], [r for _, r in pairs]
    scores = found[0]["scores"]
    assert scores["validation/main/bleu"] == BLEU().corpus_score(translations, [references]).score
    assert scores["validation/main/chrf"] == CHRF().corpus_score(translations, [references]).score
    assert scores[EXACT] == sum(t == r for t, r in pairs) / 300
    assert 0 < scores["validation/main/bleu"] < 100


EVALUATE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import chainer, chainermn, evaluation, saved
from batches import cut_batches, hold_out, pad
from corpus import ParallelText, Settings, load_corpus
comm = chainermn.create_communicator()
out = Path(sys.argv[2])
network, *_ = saved.load_network(out / "best.npz")
corpus, index = load_corpus(None, out / "corpus", Settings(), 0, comm)
batches = cut_batches(hold_out(index, 300, 1)[1], 30) if comm.rank == 0 else None
own = chainermn.scatter_dataset(batches, comm, shuffle=True, seed=0, force_equal_length=False)
device = chainer.get_device("@numpy")
evaluator = evaluation.TranslationEvaluator(comm, own, corpus, network, device)
scores = evaluator(None)
pairs = []
for rows in own:
    text = ParallelText(corpus, rows)
    xs = pad([source for source, _ in text])
    for i, row in enumerate(network.translate(xs)):
        pairs.append((corpus.vocabularies[1].decode(row), text.get_lines(i)[1]))
    text.close()
counts = comm.gather_obj(len(own))
if comm.rank == 0:
    print(json.dumps({"scores": scores, "pairs": pairs, "batches": counts}))
"""


@pytest.mark.each_mpi
def test_three_ranks_end_together_with_an_odd_corpus(read_log, train, dates, tmp_path):
    assert train(3, tmp_path / "result", *corpus_options(dates), *SMALL, "--quiet").stdout == ""
    # Of 203 pairs, 37 are held out; each rank gets 56 of the other 166.
    assert [row["iteration"] for row in read_log(tmp_path / "result")] == [7, 14]


def test_gzipped_text_and_other_options(read_log, train, app, dates, tmp_path):
    packed = tuple(tmp_path / f"{path.name}.gz" for path in dates)
    for path, plain in zip(packed, dates, strict=True):
        path.write_bytes(gzip.compress(plain.read_bytes()))
        assert app.corpus._unpacked(path, tmp_path).read_bytes() == plain.read_bytes()
    options = [*SMALL, "--epoch", "1", "--share-embedding", "--layer", "2"]
    train(1, tmp_path / "result", *corpus_options(packed), *options, "--optimizer", "rmsprop")
    assert read_log(tmp_path / "result")[-1]["iteration"] == math.ceil(166 / 8)


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_run_that_goes_on_is_as_one_never_interrupted(read_log, train, dates, tmp_path, kind):
    options = [*corpus_options(dates), *SMALL, "--model", kind, "--tensorboard"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(2, straight, *options)
    assert "resuming after" not in train(2, resumed, *options, "--epoch", "1").stdout
    first = read_bytes(resumed, "model.npz")
    job = train(2, resumed, *options)
    assert f"resuming after iteration 11, epoch 1, from {resumed}/snapshot" in job.stdout
    for key in ("epoch", "iteration", "main/loss", "lr", *SCORES):
        assert [row[key] for row in read_log(resumed)] == [row[key] for row in read_log(straight)]
    last, wanted = (load(out / "model.npz") for out in (resumed, straight))
    for name in wanted:
        np.testing.assert_array_equal(last[name], wanted[name], err_msg=name)
    assert first != read_bytes(resumed, "model.npz")
    assert any((resumed / "tensorboard").iterdir())


def test_other_ways_to_go_on(read_log, train, dates, tmp_path):
    out = tmp_path / "result"
    options = [*corpus_options(dates), *SMALL]
    train(1, out, *options)
    (out / "attention.png").unlink()  # as if it had been killed just before it was drawn
    job = train(1, out, *options, warns=True)  # nothing is left to do
    assert "resuming after iteration 42" in job.stderr
    shown = job.stdout
    files = re.search(r"networks: .*/\{(.*)\}\n", shown)[1].split(",")
    assert "loss.png" in files and all((out / name).exists() for name in files)
    assert f"exactly, loss {read_log(out)[-1]['validation/main/loss']:.4f}\n" in shown
    # More epochs, on another number of ranks.
    assert "resuming after iteration 42" in train(2, out, *options, "--epoch", "3").stdout
    assert [row["epoch"] for row in read_log(out)] == [1, 2, 3]
    # A named snapshot is resumed with other options; without --resume, they are an error.
    options += ["--lr", "0.1"]
    shown = train(1, out, *options, "--resume", out / "snapshot_iter_21.0").stdout
    assert "resuming after iteration 21, epoch 1" in shown
    log = read_log(out)
    job = train(1, tmp_path / "result", *options, "--seed", "1", "--epoch", "1", fails=True)
    assert re.search(r"error: .* with other settings \(.*seed: 0, now 1", job.stderr)
    assert read_log(out) == log


def read_bytes(out: Path, name: str) -> bytes:
    return (out / name).read_bytes()


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as content:
        return dict(content)


def test_best_network_is_that_of_the_criterion(read_log, train, dates, tmp_path):
    out = tmp_path / "result"
    options = [*corpus_options(dates), *SMALL, "--criterion", "chrf", "--lr", "0.02"]
    train(1, out, *options, "--epoch", "4")
    chrf = [row["validation/main/chrf"] for row in read_log(out)]
    best = json.loads((out / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("validation/main/chrf", max(chrf))
    assert best["epoch"] == chrf.index(max(chrf)) + 1 > 1
    for ranks, options, epoch in (
        (1, ["--evaluate"], best["epoch"]),
        (2, ["--evaluate", out / "model.npz"], 4),
    ):
        files = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
        shown = train(ranks, out, *corpus_options(dates), *SMALL, *options).stdout
        row = read_log(out)[epoch - 1]
        bleu, chrf = row["validation/main/bleu"], row["validation/main/chrf"]
        assert f"BLEU {bleu:.4f}, chrF {chrf:.4f}\n" in shown
        assert files == {path: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_float16_learns_as_float32_does(read_log, train, dates, tmp_path, kind):
    options = [*corpus_options(dates), *SMALL, "--model", kind, "--hold-out", "101"]
    train(2, tmp_path / "wide", *options)
    train(2, tmp_path / "mixed", *options, "--mixed16")
    for mixed, wide in zip(*map(read_log, (tmp_path / "mixed", tmp_path / "wide")), strict=True):
        for name in ("main/loss", "validation/main/loss"):
            assert mixed[name] == pytest.approx(wide[name], rel=0.02)
            assert mixed[name] != wide[name]
    assert {array.dtype for array in load(tmp_path / "mixed/best.npz").values()} == {np.dtype("e")}
    shown = train(1, tmp_path / "mixed", *options, "--mixed16", "--evaluate").stdout
    (loss,) = re.findall(r"loss (\d\.\d{4})", shown)
    assert float(loss) == pytest.approx(mixed["validation/main/loss"], abs=1e-3)


def test_files_to_validate_with(read_log, train, dates, tmp_path):
    lines = [path.read_text("utf-8").splitlines(keepends=True) for path in dates]
    others = tmp_path / "a.source", tmp_path / "a.target"
    for path, content in zip(others, lines, strict=True):
        path.write_text("".join([*content[:20], "\n", "word " * 60 + "\n"]), "utf-8")
    validation = ["--validation-source", others[0], "--validation-target", others[1]]
    out = tmp_path / "result"
    shown = train(2, out, *corpus_options(dates), *SMALL, *validation, "--epoch", "1").stdout
    assert "203 pairs to train on, 20 to validate with, skipped: none\n" in shown
    assert "skipped of those to validate with: 1 empty, 1 too long\n" in shown
    assert read_log(out)[-1]["iteration"] == math.ceil(203 / 2 / 8)
    assert read_log(out)[-1][EXACT] * 20 % 1 == 0


def test_training_stops_without_progress(read_log, train, dates, tmp_path):
    out = tmp_path / "result"
    nothing_learnt = ["--lr", "0", "--patience", "2"]
    train(2, out, *corpus_options(dates), *SMALL, *nothing_learnt, "--epoch", "9")
    assert len(read_log(out)) == 3
    # A restart ends in the same epoch, even if the job had been killed earlier.
    options = [*corpus_options(dates), *SMALL, *nothing_learnt, "--epoch", "9"]
    for killed in (out, tmp_path / "killed"):
        if killed != out:
            shutil.copytree(out, killed, ignore=shutil.ignore_patterns("snapshot_iter_33.0"))
            assert len(list(killed.glob("snapshot_iter_*"))) == 2
        assert "resuming after" in train(2, killed, *options).stdout
        assert len(read_log(killed)) == 3


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


@pytest.mark.each_mpi
def test_model_parallel_training_is_that_of_one_process(read_log, train, app, dates, tmp_path):
    out = tmp_path / "result"
    options = [*corpus_options(dates), *SMALL, "--dropout", "0", "--clip", "0.5", "--lr", "0.01"]
    options += ["--warmup", "0"]
    script = "train_model_parallel.py"
    assert train(2, out, *options, "--epoch", "1", "--quiet", script=script).stdout == ""
    job = train(2, out, *options, script=script)
    assert "resuming after iteration 21, epoch 1" in job.stdout
    assert job.stdout.startswith("ranks: 2, hosts: 1, communicator: SingleNodeCommunicator\n")

    (description,), (index,) = (out.glob(f"corpus/{name}-*") for name in ("vocabulary", "index"))
    found = json.loads(description.read_text(encoding="utf-8"))
    vocabularies = tuple(map(app.vocabulary.Vocabulary, found["vocabularies"]))
    corpus = app.corpus.Corpus(dates, vocabularies, 203, "", {}, app.corpus.Settings())
    rows, _ = app.batches.hold_out(np.load(index), 37, 0)
    np.random.seed(0)
    network = app.models.MODELS["lstm"](*map(len, corpus.vocabularies), 16)
    optimizer = chainer.optimizers.Adam(alpha=0.01).setup(network)
    optimizer.add_hook(GradientClipping(0.5))
    batches = app.batches.BucketIterator(app.corpus.ParallelText(corpus, rows), 8, 0)
    while batches.epoch < 2:
        xs, ys = map(app.batches.pad, zip(*next(batches), strict=True))
        optimizer.update(network.loss, xs, ys)
    batches.finalize()

    saved = app.models.MODELS["lstm"](*map(len, corpus.vocabularies), 16)
    chainer.serializers.load_npz(out / "model.npz", saved)
    for (name, got), (_, wanted) in zip(
        sorted(saved.namedparams()), sorted(network.namedparams()), strict=True
    ):
        np.testing.assert_allclose(got.array, wanted.array, rtol=1e-3, atol=1e-4, err_msg=name)
    last = read_log(out)[-1]
    assert last["iteration"] == optimizer.t == 42
    job = train(1, out, *options, "--evaluate", out / "model.npz")
    assert f"BLEU {last['validation/main/bleu']:.4f}, " in job.stdout
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
    ],
)
def test_description_of_something_else(app, described, change, message, tmp_path):
    for key, value in change.items():
        place = described if key in described else described["sizes"]
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


def test_lines_that_are_too_long_to_translate(described, run_script, tmp_path):
    shown = run_script("translate.py", tmp_path / "best.npz", text="a\n" + "b " * 2499 + "\n")
    assert shown.count("\n") == 2
    text = "a\n" + "b " * 2500 + "\na\n"
    shown = run_script("translate.py", tmp_path / "best.npz", text=text, fails=True)
    assert shown == "error: standard input:2: expected a line of at most 5000 bytes\n"
    (tmp_path / "long").write_text(text)
    options = ["--source", tmp_path / "long", "--target", tmp_path / "long"]
    shown = run_script("evaluate.py", tmp_path / "best.npz", *options, fails=True)
    assert shown == f"error: {tmp_path}/long:2: expected a line of at most 5000 bytes\n"


def test_every_rank_ends_with_one_clear_error(train, dates, tmp_path):
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(dates[0].read_bytes())[:-30])
    empty = tmp_path / "empty"
    empty.touch()
    pipe, hole = tmp_path / "pipe", tmp_path / "hole"
    os.mkfifo(pipe)
    hole.touch()
    os.truncate(hole, 1 << 40)
    other = tmp_path / "other"
    train(1, other, *corpus_options(dates), *SMALL, "--max-vocabulary", "30", "--epoch", "1")
    snapshot = next(other.glob("snapshot_iter_*.0"))
    strange, strange_model = tmp_path / "strange.0", tmp_path / "strange.npz"
    set_traps(snapshot, strange, tmp_path / "trapped")
    set_traps(other / "best.npz", strange_model, tmp_path / "trapped")
    cases = [
        ((tmp_path / "absent", dates[1]), [], "No such file or directory: '.*absent'"),
        ((damaged, dates[1]), [], "damaged.gz: damaged gzip file"),
        ((dates[0], pipe), [], "pipe: expected a regular file, got a pipe or a device"),
        ((hole, dates[1]), [], "hole:1: expected a line of at most 1000000 bytes"),
        (dates, ["--subwords", damaged], "damaged.gz is not a model of subwords"),
        (dates, ["--subwords", empty], "empty is not a model of subwords"),
        (dates, ["--resume", snapshot], f"{snapshot} does not fit"),
        (dates, ["--resume", strange], f"{strange} is a pickle of more than None, numbers and"),
        (dates, ["--evaluate", strange_model], f"{strange_model} is a pickle of more than None"),
        (dates, ["--resume", dates[0]], f"{dates[0]} is not an NPZ file"),
        (dates, ["--evaluate", dates[0]], "dates.source is not an NPZ file"),
        (dates, ["--evaluate"], "No such file or directory: .*best.npz"),
        (dates, ["--model", "transformer", "--unit", "10"], "got 10 units and 4 heads"),
        (dates, ["--validation-target", dates[1]], "source and --validation-target belong tog"),
        (dates, ["--hold-out", "0"], "--hold-out must be a positive number, got 0"),
        (dates, ["--dropout", "1"], "--dropout must be .* less than 1, got 1"),
    ]
    runs = [
        ["--out", tmp_path / "result", *corpus_options(files), *SMALL, *options]
        for files, options, _ in cases
    ]
    jobs = run_in_turn(2, HERE / "train.py", runs, cwd=tmp_path)
    assert not (tmp_path / "trapped").exists()
    for (_, _, message), job in zip(cases, jobs, strict=True):
        assert job.returncode != 0, job
        assert re.search(f"error: .*{message}", job.stderr), job
        assert job.stderr.count("error: ") == 1
        assert "Traceback" not in job.stderr
