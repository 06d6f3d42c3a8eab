"""The apps train on several hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ci.multinode.hosts import Hosts
from ci.multinode.jobs import Job, output_of

HERE = Path(__file__).resolve().parent
APPS = HERE.parents[1] / "apps"
TRAIN, VALIDATION = 40, 10

Start = Callable[..., Job]


def read_log(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "log").read_text())


def draw_images(hosts: Hosts, names: list[str], folder: Path) -> None:
    command = [sys.executable, str(HERE / "scripts/draw_images.py"), str(folder)]
    hosts.check_all(*command, str(TRAIN), str(VALIDATION), on=names)


def imagenet(data: Path, out: Path) -> list[str | Path]:
    lists: list[str | Path] = [
        "--train",
        data / "train.txt",
        "--val",
        data / "val.txt",
        "--root",
        data,
    ]
    short = ["--arch", "small", "--epoch", "1", "--batchsize", "4", "--loaderjob", "1"]
    return [APPS / "imagenet/train.py", *lists, *short, "--out", out]


def check_clocks(about: dict[str, Any], hosts: Hosts) -> None:
    first, second = hosts.names[:2]
    assert about["hosts"] == {"0": first, "1": first, "2": second, "3": second}
    assert about["clocks"][first] == {"start": 0, "end": 0, "error": 0}
    clock = about["clocks"][second]
    assert clock["error"] > 0
    if hosts.emulated:  # on one machine, with one clock
        assert max(abs(clock["start"]), abs(clock["end"])) <= clock["error"]


def test_mnist(start_job: Start, hosts: Hosts, local_path: Path) -> None:
    out = local_path / "result"
    options = ["--epoch", "2", "--unit", "20", "--out", out]
    timeline = local_path / "timeline.json"
    env = {"CHAINERMN_TIMELINE": str(timeline)}
    job = start_job((2, 2), [APPS / "mnist/train.py", *options], env=env).wait()
    assert "after 2 epochs" in output_of(job)
    check_clocks(json.loads(timeline.read_text())["otherData"], hosts)
    log = read_log(out)
    assert [row["iteration"] for row in log] == [12, 24]
    assert log[-1]["main/loss"] < log[0]["main/loss"]


def test_mnist_without_data_where_they_are_read(start_job: Start, local_path: Path) -> None:
    options = ["--dataset", "mnist", "--data", local_path, "--out", local_path / "result"]
    job = start_job((1, 1), [APPS / "mnist/train.py", *options]).wait()
    assert job.returncode != 0
    assert (job.timed_out, job.left_behind) == (False, []), job
    assert "Traceback" not in job.stderr
    assert f"error: {local_path} contains no train-images-idx3-ubyte, gzipped" in job.stderr


def test_imagenet_with_images_on_every_host(
    start_job: Start, local_path: Path, hosts: Hosts
) -> None:
    data, out = local_path / "images", local_path / "result"
    draw_images(hosts, hosts.names[:2], data)
    output_of(start_job((1, 1), imagenet(data, out)).wait())
    (row,) = read_log(out)
    assert row["iteration"] == TRAIN // 2 // 4
    for key in ("validation/main/accuracy", "validation/main/top5"):
        assert row[key] * VALIDATION == round(row[key] * VALIDATION)


def test_imagenet_without_images_on_one_host(
    start_job: Start, local_path: Path, hosts: Hosts
) -> None:
    data = local_path / "images"
    draw_images(hosts, hosts.names[:1], data)
    job = start_job((1, 1), imagenet(data, local_path / "result")).wait()
    assert job.returncode != 0
    assert (job.timed_out, job.left_behind) == (False, []), job
    assert f"host {hosts.names[1]} has no file {data}/val/" in job.stderr
