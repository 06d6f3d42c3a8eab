"""Scripts written for the ChainerMN in Chainer's wheel do the same here, unchanged.

The wheel lacks its examples. The scripts here are our own, with the same calls, arguments and
input files.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chainermn.testing.mpiexec import run_job

SCRIPTS = Path(__file__).parent / "scripts"
IMPLEMENTATIONS = {"ours": "", "the original": "1"}


# Runs scripts one after the other, and keeps what each of them prints; only rank 0 prints.
RUNS = """
import contextlib, io, json, multiprocessing, runpy, sys
from pathlib import Path
import chainer.training.extensions

out, scripts, runs = sys.argv[1:]
for script, *arguments in json.loads(runs):
    sys.argv = [script, *arguments]
    multiprocessing.set_start_method(None, force=True)  # a script may choose it again
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(Path(scripts, script)), run_name="__main__")
    if printed.getvalue():
        Path(out, script).with_suffix(".txt").write_text(printed.getvalue())
import chainermn
is_original = chainermn.__version__.startswith("7.")
assert is_original == (Path(out).parent.name == "the original")
"""


def read_log(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "log").read_text())
    return [{key: row[key] for key in row if key != "elapsed_time"} for row in rows]


def assert_equal_logs(results: Path, where: str, n_epochs: int, least: int) -> None:
    """Compare the logs of both; each row has at least this many numbers."""
    ours, originals = (read_log(results / name / where) for name in IMPLEMENTATIONS)
    assert [row["epoch"] for row in ours] == list(range(1, n_epochs + 1))
    assert len(ours[0]) >= least
    assert ours[0]["main/loss" if "main/loss" in ours[0] else "gen/loss"] > 0
    for row, original in zip(ours, originals, strict=True):
        assert row == pytest.approx(original, rel=1e-5)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the root of a Chainer cache that holds a small MNIST."""
    root = tmp_path_factory.mktemp("cache")
    folder = root / "pfnet/chainer/mnist"
    folder.mkdir(parents=True)
    random = np.random.RandomState(0)
    for name, n in (("train", 90), ("test", 30)):
        pixels = random.randint(0, 256, (n, 784)).astype(np.uint8)
        np.savez(folder / f"{name}.npz", x=pixels, y=random.randint(0, 10, n).astype(np.uint8))
    return str(root)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images, lists for training and validation, and a mean image."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.RandomState(0)
    names = [f"{i}.png" for i in range(26)]
    for name in names:
        pixels = random.randint(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name)
    labeled = [f"{name} {i % 3}\n" for i, name in enumerate(names)]
    (folder / "train.txt").write_text("".join(labeled[:20]))
    (folder / "val.txt").write_text("".join(labeled[20:]))
    (folder / "images.txt").write_text("".join(f"{name}\n" for name in names))
    np.save(folder / "mean.npy", np.full((3, 8, 8), 120, np.float32))
    return folder


@pytest.fixture(scope="module")
def results(mnist: str, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what all scripts have written, by implementation and ranks."""
    folder = tmp_path_factory.mktemp("results")
    everything = "use_everything.py {out}"
    digits = "read_digits.py -b 10 -u 8 --communicator naive --out {out}/digits"
    # One batch has all images of a rank: their order depends on which thread draws first.
    classes = "classify_images.py train.txt val.txt --root . -B 10 -j 1 -b 3 -o {out}/classes"
    classes += " --communicator naive"
    players = "invent_images.py -i . -b 4 -e 2 -o {out}/players --snapshot_interval 4"
    players += " --communicator naive"
    perceptron = "divide_perceptron.py -b 15 --unit 8 --epoch 2 --out {out}/perceptron"

    def run(name: str, ranks: int, *commands: str) -> None:
        out = folder / name / str(ranks)
        out.mkdir(parents=True, exist_ok=True)
        runs = json.dumps([[word.format(out=out) for word in line.split()] for line in commands])
        env = {"CHAINER_COMPAT_BUNDLED_CHAINERMN": IMPLEMENTATIONS[name]}
        env |= {"PYTHONWARNINGS": "ignore", "CHAINER_DATASET_ROOT": mnist}
        job = run_job(ranks, ["-c", RUNS, out, SCRIPTS, runs], env=env, cwd=images)
        assert job.returncode == 0, job

    resumed = f"{digits} --epoch 3 --resume {{out}}/digits/snapshot_iter_5"
    scripts = [f"{classes} -E 2", everything, f"{digits} -e 1", resumed, players]
    run("ours", 2, *scripts, f"{classes} -E 4")
    # The original runs in one go, because it loses a step when resumed.
    run("the original", 2, f"{classes} -E 4", everything, f"{digits} -e 3", players)
    for name in IMPLEMENTATIONS:
        run(name, 4, everything, perceptron)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_every_part_of_it_gives(results: Path, ranks: int) -> None:
    ours, originals = (
        (results / name / str(ranks) / "use_everything.txt").read_text().splitlines()
        for name in IMPLEMENTATIONS
    )
    assert len(ours) > 120 * ranks
    assert ours == originals


def test_data_parallelism_with_a_snapshot(results: Path) -> None:
    for name in IMPLEMENTATIONS:
        printed = (results / name / "2/read_digits.txt").read_text()
        assert printed.startswith("Num process (COMM_WORLD): 2")
    assert_equal_logs(results, "2/digits", 3, least=6)


def test_model_and_data_parallelism_on_four_ranks(results: Path) -> None:
    assert_equal_logs(results, "4/perceptron", 2, least=6)


def test_images_by_worker_processes_go_on_from_a_checkpoint(results: Path) -> None:
    assert_equal_logs(results, "2/classes", 4, least=5)


def test_two_optimizers(results: Path) -> None:
    for name in IMPLEMENTATIONS:
        assert (results / name / "2/players/gen_iter_4.npz").exists()
    assert_equal_logs(results, "2/players", 2, least=4)
