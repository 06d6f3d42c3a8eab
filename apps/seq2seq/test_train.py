"""Train on a few ranks and check what comes out."""

import gzip
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import chainer
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.optimizer_hooks import GradientClipping
from sacrebleu.metrics import BLEU, CHRF

from chainermn.testing.mpiexec import (
    JobResult,
    launch_environment,
    mpi_flavour,
)

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
EXACT = "validation/main/exact"
# Seconds after which something hangs, on however busy a machine.
LIMIT = 600
SCORES = [f"validation/main/{name}" for name in ("loss", "exact", "bleu", "chrf")]

SMALL = ("--unit", "16", "--batchsize", "8", "--hold-out", "37", "--epoch", "2")


def direct_environment() -> dict[str, str]:
    """Return an environment in which mpiexec starts scripts with this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**launch_environment(), "PATH": path}


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
    assert log[-1][EXACT] > 0.5  # the default, 6 epochs, leads to more than 0.98
    assert log[-1]["tokens/s"] > 0


@pytest.mark.gpu
def test_learns_on_a_gpu(read_log, train, tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    out = tmp_path / "result"
    train(1, out, "--gpu", "--epoch", "1")
    assert read_log(out)[-1][EXACT] > 0.5


def test_pictures_and_snapshots_are_written(two_ranks):
    _, out = two_ranks
    plots = ["attention.png", "exact.png", "loss.png", "score.png"]
    others = ["corpus", "log", "model.json", "snapshot_epoch_1"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*plots, *others])
    for name in plots:
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_only_rank_0_prints_and_plainly_where_no_terminal_is(two_ranks):
    job, out = two_ranks
    first, *lines = job.stdout.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    assert lines[0] == "20000 pairs to train on, 1000 to validate with, skipped: none"
    assert re.fullmatch(r"vocabularies of \d+ and 15 tokens", lines[1])
    assert lines[2].split()[:2] == ["epoch", "main/loss"]
    assert lines[3].split()[0] == "1"
    assert len(lines[4:-3]) == 8
    assert re.fullmatch(r"\d\d\.\d\d% of the validation data .* after 1 epoch", lines[-3])
    assert re.fullmatch(r"BLEU \d\d\.\d{4}, chrF \d\d\.\d{4}", lines[-2])
    assert lines[-1].startswith(f"curves, attention and log: {out}/{{")
    assert "\033" not in job.stdout


def test_translate_with_a_snapshot(run_script, two_ranks, dates):
    _, out = two_ranks
    lines, wanted = ([*path.read_text("utf-8").splitlines()[:60], ""] for path in dates)
    for options in (["--beam", "3", "--batchsize", "25"], []):
        shown = run_script(
            "translate.py", out / "snapshot_epoch_1", *options, text="\n".join(["", *lines])
        )
        empty, *found = shown.splitlines()
        assert empty == ""
        assert len(found) == 60
        assert sum(map(str.__eq__, found, wanted)) > 0.4 * 60


def test_scores_are_equal_on_1_and_3_ranks_and_in_sacrebleu(start, two_ranks, tmp_path):
    """Evaluate one snapshot on 1 and 3 ranks, and its translations with sacreBLEU itself."""
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
import chainer, chainermn, evaluation, translate
from batches import cut_batches, hold_out, pad
from corpus import ParallelText, Settings, load_corpus
comm = chainermn.create_communicator()
out = Path(sys.argv[2])
network, *_ = translate.load(out / "snapshot_epoch_1")
corpus, index = load_corpus(None, None, out / "corpus", Settings(), 0, comm)
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
    train(3, tmp_path / "result", *corpus_options(dates), *SMALL)
    # Of 203 pairs 37 are held out; each rank gets 56 of the other 166.
    assert [row["iteration"] for row in read_log(tmp_path / "result")] == [7, 14]


def test_gzipped_text_and_other_options(read_log, train, app, dates, tmp_path):
    packed = tuple(tmp_path / f"{path.name}.gz" for path in dates)
    for path, plain in zip(packed, dates, strict=True):
        path.write_bytes(gzip.compress(plain.read_bytes()))
        assert app.corpus._unpack(path, tmp_path).read_bytes() == plain.read_bytes()
    options = [*SMALL, "--epoch", "1", "--share-embedding", "--layer", "2"]
    train(1, tmp_path / "result", *corpus_options(packed), *options, "--optimizer", "rmsprop")
    assert read_log(tmp_path / "result")[-1]["iteration"] == math.ceil(166 / 8)


def test_resumed_run_is_as_one_never_interrupted(read_log, train, dates, tmp_path):
    options = [*corpus_options(dates), *SMALL, "--cache", tmp_path / "cache"]
    train(2, tmp_path / "straight", *options)
    train(2, tmp_path / "resumed", *options, "--epoch", "1")
    train(2, tmp_path / "resumed", *options, "--resume", tmp_path / "resumed/snapshot_epoch_1")
    straight, resumed = read_log(tmp_path / "straight"), read_log(tmp_path / "resumed")
    for key in ("epoch", "iteration", "main/loss", "lr", *SCORES):
        assert [row[key] for row in resumed] == [row[key] for row in straight]


def test_rates_fall_and_training_stops_without_progress(read_log, train, app, dates, tmp_path):
    out = tmp_path / "result"
    nothing_learnt = ["--lr", "0", "--patience", "2"]
    train(2, out, *corpus_options(dates), *SMALL, *nothing_learnt, "--epoch", "9")
    assert len(read_log(out)) == 3

    class Comm:
        rank = 0

        def bcast_obj(self, value: float) -> float:
            return value

    decay = app.training.PlateauDecay(Comm(), "lr", 1.0, 0.5, 2)
    rates = []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5):
        decay._observe(loss)
        rates.append(decay.rate)
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


@pytest.mark.each_mpi
def test_model_parallel_training_is_that_of_one_process(read_log, train, app, dates, tmp_path):
    out = tmp_path / "result"
    options = [*corpus_options(dates), *SMALL, "--dropout", "0", "--clip", "0.5", "--lr", "0.01"]
    job = train(2, out, *options, script="train_model_parallel.py")
    assert job.stdout.startswith("ranks: 2, hosts: 1, communicator: SingleNodeCommunicator\n")

    found = json.loads((out / "corpus/vocabulary.json").read_text(encoding="utf-8"))
    corpus = app.corpus.Corpus(
        *dates, tuple(map(app.vocabulary.Vocabulary, found["vocabularies"])), {}
    )
    rows, _ = app.batches.hold_out(np.load(out / "corpus/index.npy"), 37, 0)
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
    assert read_log(out)[-1]["iteration"] == optimizer.t == 42


def test_every_rank_ends_with_one_clear_error(train, dates, tmp_path):
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(dates[0].read_bytes())[:-30])
    other = tmp_path / "other"
    train(1, other, *corpus_options(dates), *SMALL, "--max-vocabulary", "30", "--epoch", "1")
    snapshot = other / "snapshot_epoch_1"
    cases = [
        ((tmp_path / "absent", dates[1]), [], "No such file or directory: '.*absent'"),
        ((damaged, dates[1]), [], "damaged.gz: damaged gzip file"),
        (dates, ["--resume", snapshot], "snapshot_epoch_1 was written with other vocabularies"),
        (dates, ["--resume", dates[0]], "dates.source is not a snapshot of this program"),
    ]
    for files, options, message in cases:
        options = [*corpus_options(files), *SMALL, *options]
        job = train(2, tmp_path / "result", *options, fails=True)
        assert re.search(f"error: .*{message}", job.stderr), job
        assert job.stderr.count("error: ") == 1
        assert "Traceback" not in job.stderr


# The README


def stop(process: subprocess.Popen) -> None:
    """End a process that leads a session, and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(
    not (REPOSITORY / "libs/chainermn/pyproject.toml").exists(), reason="this is a copy"
)
@pytest.mark.venv
@pytest.mark.skipif(
    "CHAINERMN_WHEELHOUSE" not in os.environ,
    reason="CHAINERMN_WHEELHOUSE names no folder of wheels to install a copy from",
)
@pytest.mark.skipif(
    not importlib.util.find_spec("ensurepip"), reason="this Python makes no environments (venv)"
)
def test_copied_app_trains(read_log, tmp_path):
    if mpi_flavour() == "openmpi":
        pytest.skip("a copy brings an MPI of its own: tested where this environment has MPICH")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"as they are\. -->\n```sh\n(.*?)```", readme, re.DOTALL)
    # A copy of what cannot be written cannot be written either.
    commands = commands.replace("\n", "\nchmod -R u+w ~\n", 1)
    environment = {
        **direct_environment(),
        "HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": Path(os.environ["CHAINERMN_WHEELHOUSE"]).as_uri(),
    }
    environment.pop("PYTHONPATH", None)
    output = tmp_path / "output"
    with output.open("wb") as written:
        shell = subprocess.Popen(
            ["sh", "-ec", commands],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout=LIMIT)
        finally:
            stop(shell)
    assert shell.returncode == 0, output.read_text()
    assert read_log(tmp_path / "dates/result")[-1][EXACT] > 0.8
