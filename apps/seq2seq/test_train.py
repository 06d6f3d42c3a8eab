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
from collections import Counter
from pathlib import Path

import chainer
import matplotlib.font_manager  # noqa: F401  - announces its first use ever on standard error
import numpy as np
import pytest
from chainer.backends import cuda
from chainer.optimizer_hooks import GradientClipping
from sacrebleu.metrics import BLEU, CHRF

from chainermn.testing.mpiexec import (
    JobResult,
    launch_environment,
    mpi_flavour,
    run_job,
)

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
EXACT = "validation/main/exact"
# Seconds after which something hangs, on however busy a machine.
LIMIT = 600
SCORES = [f"validation/main/{name}" for name in ("loss", "exact", "bleu", "chrf")]
# The modules import each other by plain names, which modules of other apps have too.
NAMES = ("terminal", "generated", "model", "data", "evaluation", "training")


def load_modules() -> dict:
    others = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(HERE))
    try:
        return {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(HERE))
        for name, other in others.items():
            del sys.modules[name]
            if other is not None:
                sys.modules[name] = other


modules = load_modules()
data, evaluation, generated = modules["data"], modules["evaluation"], modules["generated"]
model, training = modules["model"], modules["training"]

# The threads of a BLAS wait for each other for long where other programs use the cores too.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SMALL = ("--unit", "16", "--batchsize", "8", "--hold-out", "37", "--epoch", "2")


def start(ranks: int, out: Path, *options: str | Path, script: str = "train.py") -> JobResult:
    env = ONE_THREAD if ranks == 1 else {}  # for more ranks the library sees to it
    arguments = [HERE / script, "--out", out, *options]
    return run_job(ranks, arguments, cwd=out.parent, env=env, timeout=LIMIT)


def train(ranks: int, out: Path, *options: str | Path, script: str = "train.py") -> JobResult:
    job = start(ranks, out, *options, script=script)
    assert (job.returncode, job.stderr) == (0, ""), job
    assert not job.timed_out
    assert not job.left_behind
    return job


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


def direct_environment() -> dict[str, str]:
    """Return an environment in which mpiexec starts scripts with this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**launch_environment(), "PATH": path}


@pytest.fixture(scope="module")
def dates(tmp_path_factory) -> tuple[Path, Path]:
    """Return two files of an odd number of lines."""
    folder = tmp_path_factory.mktemp("dates")
    paths = folder / "dates.source", folder / "dates.target"
    generated.write(*paths, 203, 1)
    return paths


def corpus_options(files: tuple[Path, Path]) -> list[str | Path]:
    return ["--source", files[0], "--target", files[1]]


# Training


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[JobResult, Path]:
    out = tmp_path_factory.mktemp("two_ranks") / "result"
    return train(2, out, "--epoch", "1"), out


def test_two_ranks_learn_to_read_dates(two_ranks):
    _, out = two_ranks
    log = read_log(out)
    assert [row["iteration"] for row in log] == [math.ceil(10000 / 64)]
    assert log[-1][EXACT] > 0.5  # the default, 6 epochs, leads to more than 0.98
    assert log[-1]["tokens/s"] > 0


@pytest.mark.gpu
def test_learns_on_a_gpu(tmp_path):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    out = tmp_path / "result"
    job = start(1, out, "--gpu", "--epoch", "1")
    assert job.returncode == 0, job
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


def test_translate_with_a_snapshot(two_ranks, dates):
    _, out = two_ranks
    lines, wanted = ([*path.read_text("utf-8").splitlines()[:60], ""] for path in dates)
    for options in (["--beam", "3", "--batchsize", "25"], []):
        shown = subprocess.run(
            [sys.executable, HERE / "translate.py", out / "snapshot_epoch_1", *options],
            input="\n".join(["", *lines]).encode(),
            env={**os.environ, **ONE_THREAD},
            capture_output=True,
            timeout=LIMIT,
        )
        assert (shown.returncode, shown.stderr) == (0, b""), shown
        empty, *found = shown.stdout.decode().splitlines()
        assert empty == ""
        assert len(found) == 60
        assert sum(map(str.__eq__, found, wanted)) > 0.4 * 60


def test_scores_are_equal_on_1_and_3_ranks_and_in_sacrebleu(two_ranks, tmp_path):
    """Evaluate one snapshot on 1 and 3 ranks, and its translations with sacreBLEU itself."""
    _, out = two_ranks
    script = tmp_path / "evaluate.py"
    script.write_text(EVALUATE)
    found = []
    for ranks in (1, 3):
        job = run_job(ranks, [script, HERE, out], timeout=LIMIT, env=ONE_THREAD)
        assert (job.returncode, job.stderr) == (0, ""), job
        found.append(json.loads(job.stdout))
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
import chainermn, data, evaluation, translate
import chainer
comm = chainermn.create_communicator()
out = Path(sys.argv[2])
network, *_ = translate.load(out / "snapshot_epoch_1")
corpus, index = data.load(None, None, out / "corpus", data.Settings(), 0, comm)
batches = data.cut_batches(data.hold_out(index, 300, 1)[1], 30) if comm.rank == 0 else None
own = chainermn.scatter_dataset(batches, comm, shuffle=True, seed=0, force_equal_length=False)
device = chainer.get_device("@numpy")
evaluator = evaluation.TranslationEvaluator(comm, own, corpus, network, device)
scores = evaluator(None)
pairs = []
for rows in own:
    text = data.ParallelText(corpus, rows)
    xs = data.pad([source for source, _ in text])
    for i, row in enumerate(network.translate(xs)):
        pairs.append((corpus.vocabularies[1].decode(row), text.get_lines(i)[1]))
    text.close()
counts = comm.gather_obj(len(own))
if comm.rank == 0:
    print(json.dumps({"scores": scores, "pairs": pairs, "batches": counts}))
"""


@pytest.mark.each_mpi
def test_three_ranks_end_together_with_an_odd_corpus(dates, tmp_path):
    train(3, tmp_path / "result", *corpus_options(dates), *SMALL)
    # Of 203 pairs 37 are held out; each rank gets 56 of the other 166.
    assert [row["iteration"] for row in read_log(tmp_path / "result")] == [7, 14]


def test_gzipped_text_and_other_options(dates, tmp_path):
    packed = tuple(tmp_path / f"{path.name}.gz" for path in dates)
    for path, plain in zip(packed, dates, strict=True):
        path.write_bytes(gzip.compress(plain.read_bytes()))
        assert data._unpack(path, tmp_path).read_bytes() == plain.read_bytes()
    options = [*SMALL, "--epoch", "1", "--share-embedding", "--layer", "2"]
    train(1, tmp_path / "result", *corpus_options(packed), *options, "--optimizer", "rmsprop")
    assert read_log(tmp_path / "result")[-1]["iteration"] == math.ceil(166 / 8)


def test_resumed_run_is_as_one_never_interrupted(dates, tmp_path):
    options = [*corpus_options(dates), *SMALL, "--cache", tmp_path / "cache"]
    train(2, tmp_path / "straight", *options)
    train(2, tmp_path / "resumed", *options, "--epoch", "1")
    train(2, tmp_path / "resumed", *options, "--resume", tmp_path / "resumed/snapshot_epoch_1")
    straight, resumed = read_log(tmp_path / "straight"), read_log(tmp_path / "resumed")
    for key in ("epoch", "iteration", "main/loss", "lr", *SCORES):
        assert [row[key] for row in resumed] == [row[key] for row in straight]


def test_rates_fall_and_training_stops_without_progress(dates, tmp_path):
    out = tmp_path / "result"
    nothing_learnt = ["--lr", "0", "--patience", "2"]
    train(2, out, *corpus_options(dates), *SMALL, *nothing_learnt, "--epoch", "9")
    assert len(read_log(out)) == 3

    class Comm:
        rank = 0

        def bcast_obj(self, value: float) -> float:
            return value

    decay = training.PlateauDecay(Comm(), "lr", 1.0, 0.5, 2)
    rates = []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5):
        decay._observe(loss)
        rates.append(decay.rate)
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


@pytest.mark.each_mpi
def test_model_parallel_training_is_that_of_one_process(dates, tmp_path):
    out = tmp_path / "result"
    options = [*corpus_options(dates), *SMALL, "--dropout", "0", "--clip", "0.5", "--lr", "0.01"]
    job = train(2, out, *options, script="train_model_parallel.py")
    assert job.stdout.startswith("ranks: 2, hosts: 1, communicator: SingleNodeCommunicator\n")

    found = json.loads((out / "corpus/vocabulary.json").read_text(encoding="utf-8"))
    corpus = data.Corpus(*dates, tuple(map(data.Vocabulary, found["vocabularies"])), {})
    rows, _ = data.hold_out(np.load(out / "corpus/index.npy"), 37, 0)
    np.random.seed(0)
    network = model.Seq2seq(*map(len, corpus.vocabularies), 16)
    optimizer = chainer.optimizers.Adam(alpha=0.01).setup(network)
    optimizer.add_hook(GradientClipping(0.5))
    batches = data.BucketIterator(data.ParallelText(corpus, rows), 8, 0)
    while batches.epoch < 2:
        xs, ys = map(data.pad, zip(*next(batches), strict=True))
        optimizer.update(network.loss, xs, ys)
    batches.finalize()

    saved = model.Seq2seq(*map(len, corpus.vocabularies), 16)
    chainer.serializers.load_npz(out / "model.npz", saved)
    for (name, got), (_, wanted) in zip(
        sorted(saved.namedparams()), sorted(network.namedparams()), strict=True
    ):
        np.testing.assert_allclose(got.array, wanted.array, rtol=1e-3, atol=1e-4, err_msg=name)
    assert read_log(out)[-1]["iteration"] == optimizer.t == 42


# Text


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("May 12, 1984", "▁May ▁1 2 , ▁1 9 8 4"),
        ("  zwölf\tUhr ", "▁zwölf ▁Uhr"),
        ("1984-05-12", "▁1 9 8 4 - 0 5 - 1 2"),
        ("<eos>", "▁< eos >"),
        (" \u3000", ""),
    ],
)
def test_lines_are_divided_and_put_together(line, tokens):
    assert data.tokenize(line) == tokens.split()
    assert data.detokenize(tokens.split()) == " ".join(line.split())


def test_vocabulary_keeps_the_most_frequent_tokens():
    counts = Counter({"▁a": 5, "▁c": 2, "▁b": 2, "▁d": 1})
    vocabulary = data.Vocabulary.of(counts, min_count=2, max_size=4)
    assert vocabulary.tokens == ("<eos>", "<unk>", "▁a", "▁b")
    assert vocabulary.encode("b a d").tolist() == [3, 2, 1]
    assert len(data.Vocabulary.of(counts, min_count=2, max_size=9)) == 5


def write_files(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    paths = folder / "a.source", folder / "a.target"
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(content)
    return paths


def prepare(files: tuple[Path, Path], folder: Path, **settings: int):
    return data._prepare(*files, folder, data.Settings(**settings))


def test_what_cannot_be_used_is_counted(tmp_path):
    source = b"one\n\n\xff\nfour five six\nseven\r\neight"
    files = write_files(tmp_path, source, b"1\n2\n3\n4\n7\n8\n")
    corpus, index = prepare(files, tmp_path, max_length=2)
    assert corpus.skipped == {"empty": 1, "not UTF-8": 1, "too long": 1}
    text = data.ParallelText(corpus, index)
    lines = [text.get_lines(i) for i in range(len(text))]
    text.close()
    assert lines == [("one", "1"), ("seven", "7"), ("eight", "8")]


def test_cache_is_used_for_the_same_files_and_settings_only(dates, tmp_path, monkeypatch):
    first, index = prepare(dates, tmp_path)
    calls = []
    original = data._index
    monkeypatch.setattr(data, "_index", lambda *args: calls.append(args) or original(*args))
    again, same = prepare(dates, tmp_path)
    assert not calls
    assert again.digest() == first.digest()
    np.testing.assert_array_equal(index, same)
    other, _ = prepare(dates, tmp_path, max_size=20)
    assert len(calls) == 1
    assert len(other.vocabularies[0]) == 20
    assert other.digest() != first.digest()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\nc", b"1\n2\n", "a.source has 3 lines and .*a.target has 2"),
        (b"a\n\n", b"1\n2\n3\n4", "a.source has 2 lines and .*a.target has 4"),
        (b"\n\na\n", b"1\n2\n3\n", "two pairs of lines or more.* have 1 .*'empty': 2"),
    ],
)
def test_error_for_files_that_do_not_fit(source, target, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare(write_files(tmp_path, source, target), tmp_path)


def test_every_rank_ends_with_one_clear_error(dates, tmp_path):
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
        job = start(2, tmp_path / "result", *corpus_options(files), *SMALL, *options)
        assert job.returncode != 0, job
        assert not job.timed_out
        assert not job.left_behind
        assert re.search(f"error: .*{message}", job.stderr), job
        assert job.stderr.count("error: ") == 1
        assert "Traceback" not in job.stderr


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_shown_on_a_terminal(watched, monkeypatch, capsys, dates, tmp_path):
    monkeypatch.setattr(modules["terminal"], "is_watched", lambda: watched)
    prepare(dates, tmp_path)
    shown = capsys.readouterr().out
    assert shown.endswith("] 100 %\n") == watched
    assert ("\rvocabulary [####" in shown) == watched


def test_buckets_visit_every_pair_once_with_little_padding():
    random = np.random.RandomState(0)
    index = np.zeros((1003, 4), np.int64)
    index[:, data.SOURCE_LENGTH] = random.randint(1, 40, size=1003)
    index[:, data.TARGET_LENGTH] = random.randint(1, 40, size=1003)

    class Rows:
        def __init__(self) -> None:
            self.index = index

        def __len__(self) -> int:
            return len(index)

        def __getitem__(self, i: int) -> int:
            return i

        def close(self) -> None:
            pass

    batches = data.BucketIterator(Rows(), 20, 0)
    epochs = []
    for _ in range(2):
        epoch = [next(batches) for _ in range(51)]
        assert batches.is_new_epoch
        assert sorted(i for batch in epoch for i in batch) == list(range(1003))
        padded = sum(len(b) * index[b, data.SOURCE_LENGTH].max() for b in epoch)
        assert index[:, data.SOURCE_LENGTH].sum() > 0.9 * padded
        epochs.append(epoch)
    assert epochs[0] != epochs[1]
    assert (batches.epoch, batches.epoch_detail) == (2, 2.0)
    again = data.BucketIterator(Rows(), 20, 0)
    assert [next(again) for _ in range(51)] == epochs[0]


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [(1, "first", "erste"), (12, "twelfth", "zwölfte"), (21, "twenty-first", "einundzwanzigste")],
)
def test_days_are_written_out(number, english, german):
    assert generated.english_ordinal(number) == english
    assert generated.german_ordinal(number) == german


@pytest.mark.parametrize(
    ("year", "english", "german"),
    [
        (1900, "nineteen hundred", "neunzehnhundert"),
        (1905, "nineteen oh five", "neunzehnhundertfünf"),
        (2000, "two thousand", "zweitausend"),
        (2001, "two thousand and one", "zweitausendeins"),
        (2084, "twenty eighty-four", "zweitausendvierundachtzig"),
    ],
)
def test_years_are_written_out(year, english, german):
    assert generated.english_year(year) == english
    assert generated.german_year(year) == german


# The network


def sentences(n: int, longest: int) -> np.ndarray:
    random = np.random.RandomState(3)
    return data.pad([random.randint(2, 9, size=1 + i % longest).astype("i") for i in range(n)])


@pytest.mark.parametrize("layers", [1, 2])
def test_one_step_after_another_scores_as_all_at_once(layers):
    network = model.Seq2seq(9, 9, 8, layers)
    xs, ys = sentences(5, 4), sentences(5, 3)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        h, c, memory = network.encoder(xs)
        whole = network.decoder((h, c), memory, xs, ys)[0].array.reshape(5, 4, 9)
        states, last = (h, c), np.zeros(5, "i")
        for t in range(4):
            states, scores = network.decoder.step(states, memory, xs, last)
            valid = t <= (ys >= 0).sum(axis=1)
            np.testing.assert_allclose(scores.array[valid], whole[valid, t], rtol=1e-4, atol=1e-5)
            last = np.maximum(ys[:, t], 0) if t < 3 else last


def test_padding_changes_nothing():
    network = model.Seq2seq(9, 9, 8)
    xs, ys = sentences(5, 4), sentences(5, 3)
    wider = [np.pad(a, ((0, 0), (0, 2)), constant_values=-1) for a in (xs, ys)]
    assert float(network.loss(*wider).array) == pytest.approx(float(network.loss(xs, ys).array))
    weights = network.attend(xs, ys)
    np.testing.assert_allclose(weights.sum(axis=2), 1, rtol=1e-5)
    assert (weights.transpose(0, 2, 1)[xs == -1] == 0).all()


def test_wide_beam_finds_the_most_probable_translation():
    network = model.Seq2seq(9, 3, 8)
    network.decoder.bias.array[:] = [3, 0, 1]  # short ones
    xs = sentences(4, 3)
    greedy, found = network.translate(xs), network.translate(xs, beam=40)

    def mean_log_p(i: int, translation: np.ndarray) -> float:
        return -float(network.loss(xs[i : i + 1], translation[None].astype("i")).array)

    every = [np.array(t, "i") for n in range(4) for t in np.ndindex(*[3] * n) if 0 not in t]
    for i in range(4):
        best = max(mean_log_p(i, t) for t in every)
        assert mean_log_p(i, found[i]) >= best - 1e-5
        assert mean_log_p(i, found[i]) >= mean_log_p(i, greedy[i]) - 1e-6


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
def test_copied_app_trains(tmp_path):
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
