"""What TensorBoard finds in its folder."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import chainer
import pytest

from chainermn.extensions import TensorBoardReport
from libs.chainermn.tests.extensions.reports import trainers


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Return the name, step and value of every scalar in a folder, oldest file first."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        content, begin = file.read_bytes(), 0
        while begin < len(content):  # a length, its checksum, an event, its checksum
            (length,) = struct.unpack_from("<Q", content, begin)
            event = Event.FromString(content[begin + 12 : begin + 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            begin += 16 + length
    return found


def train(out: Path, epochs: int, resume: Path | None = None) -> Any:
    trainer = trainers.make_trainer(out, epochs, trainers.Observe("score", (0.5, 0.25, 0.75)))
    trainer.extend(TensorBoardReport())
    if resume is not None:
        chainer.serializers.load_npz(resume, trainer)
    trainer.run()
    return trainer


def test_scalars_of_every_row(tmp_path: Path) -> None:
    train(tmp_path, 2)
    found = scalars(tmp_path / "tensorboard")
    assert [(step, value) for name, step, value in found if name == "score"] == [
        (3, 0.5),
        (6, 0.25),
    ]
    assert {name for name, _, _ in found} == {"score", "loss", "examples", "elapsed_time"}


def test_resumed_run_goes_on(tmp_path: Path) -> None:
    first = train(tmp_path / "first", 2)
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    train(tmp_path / "second", 3, tmp_path / "snapshot.npz")
    found = scalars(tmp_path / "second/tensorboard")
    assert [(step, value) for name, step, value in found if name == "score"] == [(9, 0.75)]


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboardX"):
        TensorBoardReport()
