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

from chainermn.testing.mpiexec import JobResult, run_job

SCRIPTS = Path(__file__).parent / "scripts"
IMPLEMENTATIONS = {"ours": "", "the original": "1"}


def run(
    ranks: int, script: str, *arguments: str | Path, bundled: str, cwd: Path, mnist: str = ""
) -> JobResult:
    env = {"CHAINER_COMPAT_BUNDLED_CHAINERMN": bundled, "PYTHONWARNINGS": "ignore"}
    env |= {"CHAINER_DATASET_ROOT": mnist}
    result = run_job(ranks, [SCRIPTS / script, *arguments], env=env, cwd=cwd)
    assert result.returncode == 0, result
    return result


def read_log(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "log").read_text())
    return [{key: row[key] for key in row if key != "elapsed_time"} for row in rows]


def assert_equal_logs(folder: Path, n_epochs: int, least: int) -> None:
    """Compare the logs of both; each row has at least this many numbers."""
    ours, originals = (read_log(folder / name) for name in IMPLEMENTATIONS)
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_every_part_of_it_gives(ranks: int, tmp_path: Path) -> None:
    ours, originals = (
        run(ranks, "use_everything.py", tmp_path, bundled=bundled, cwd=tmp_path).stdout.split("\n")
        for bundled in IMPLEMENTATIONS.values()
    )
    assert len(ours) > 30
    assert ours == originals


def test_data_parallelism_with_a_snapshot(mnist: str, tmp_path: Path) -> None:
    resume = ["--epoch", "3", "--resume", "ours/snapshot_iter_5"]
    jobs = [("ours", ["-e", "1"]), ("ours", resume), ("the original", ["--epoch", "3"])]
    for name, options in jobs:
        options = [*options, "-b", "10", "-u", "8", "--communicator", "naive", "--out", name]
        bundled = IMPLEMENTATIONS[name]
        job = run(2, "read_digits.py", *options, bundled=bundled, cwd=tmp_path, mnist=mnist)
        assert job.stdout.startswith("Num process (COMM_WORLD): 2")
    # The original runs in one go, because it loses a step when resumed.
    assert_equal_logs(tmp_path, 3, least=6)


def test_model_and_data_parallelism_on_four_ranks(mnist: str, tmp_path: Path) -> None:
    for name, bundled in IMPLEMENTATIONS.items():
        options = ["-b", "15", "--unit", "8", "--epoch", "2", "--out", name]
        run(4, "divide_perceptron.py", *options, bundled=bundled, cwd=tmp_path, mnist=mnist)
    assert_equal_logs(tmp_path, 2, least=6)


def test_images_by_worker_processes_go_on_from_a_checkpoint(images: Path, tmp_path: Path) -> None:
    for name, epoch in (("ours", "2"), ("ours", "4"), ("the original", "4")):
        # One batch has all images of a rank: their order depends on which thread draws first.
        options = ["train.txt", "val.txt", "--root", ".", "-B", "10", "-j", "1", "-b", "3"]
        options += ["--communicator", "naive", "-E", epoch, "-o", str(tmp_path / name)]
        bundled = IMPLEMENTATIONS[name]
        run(2, "classify_images.py", *options, bundled=bundled, cwd=images)
    assert_equal_logs(tmp_path, 4, least=5)


def test_two_optimizers(images: Path, tmp_path: Path) -> None:
    for name, bundled in IMPLEMENTATIONS.items():
        options = ["-i", images, "-b", "4", "-e", "2", "--communicator", "naive", "-o", name]
        options += ["--snapshot_interval", "4"]
        run(2, "invent_images.py", *options, bundled=bundled, cwd=images)
        (images / name).rename(tmp_path / name)
        assert (tmp_path / name / "gen_iter_4.npz").exists()
    assert_equal_logs(tmp_path, 2, least=4)
