"""Jobs run in the image of the documentation's Dockerfile: ``nox -s image_tests``."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.image.dockerfile import Image, instructions

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docs/examples/Dockerfile"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    wheels = os.environ.get("CHAINERMN_WHEELHOUSE")
    if wheels is None:
        pytest.skip("CHAINERMN_WHEELHOUSE names no wheels; nox -s image_tests sets it")
    root = tmp_path_factory.mktemp("image") / "root"
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels}
    image = Image(root, Path(wheels), pip)
    image.build(DOCKERFILE, ROOT)
    yield image
    shutil.rmtree(root)


def test_the_doctor_finds_nothing_wrong(image: Image) -> None:
    image.run("chainermn doctor")  # fails if anything is wrong


def test_two_ranks_train(image: Image) -> None:
    said = image.run("cd /tmp && mpiexec --oversubscribe -n 2 python /app/train.py --epoch 1")
    assert "main/loss" in said


def test_the_job_of_the_launcher_runs_on_one_host(image: Image) -> None:
    image.run("cd /tmp && chainermn launch -n 2 /app/train.py --epoch 1 --out launched")
    assert (image.root / "tmp/launched/log").exists()


def test_workers_let_the_launcher_in(image: Image) -> None:
    """Everybody may write to a pod's key files, and its host name is new each time."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    keys = "mkdir /root/.ssh && cd /root/.ssh && ssh-keygen -q -N '' -f id_rsa"
    keys += " && cp id_rsa.pub authorized_keys && chmod a+w . authorized_keys"
    serve = f"/usr/sbin/sshd -p {port} -o ListenAddress=localhost"
    said = image.run(f"{keys} && {serve} && ssh -p {port} -o BatchMode=yes localhost echo hello")
    assert said == "hello\n"


def test_instructions_are_read_as_docker_reads_them() -> None:
    text = "# first\nFROM a:1\n\nRUN one && \\\n    # between\n    two\nenv A=1 B=$A\n"
    assert list(instructions(text)) == [
        ("FROM", "a:1"),
        ("RUN", "one &&  two"),
        ("ENV", "A=1 B=$A"),
    ]
