"""What the streams of a real GPU did, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest

import chainermn
from chainermn.extensions import Timeline
from chainermn.profiling.timeline import trace
from chainermn.spans import MAIN

pytestmark = pytest.mark.gpu


@pytest.mark.mpi(1, 2)
def test_the_gpu_computes_after_the_host_has_said_so(shared_tmp_path: Path, a_gpu: Any) -> None:
    comm = chainermn.create_communicator("naive")
    model = chainer.links.Classifier(chainer.links.Linear(1000, 1000))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    x, t = np.ones((64, 1000), np.float32), np.zeros(64, np.int32)
    batches = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(x, t), 32)
    device = chainer.backend.get_device_from_array(a_gpu.to_gpu(x))
    updater = chainer.training.StandardUpdater(batches, optimizer, device=device)
    trainer = chainer.training.Trainer(updater, (6, "iteration"), out=str(shared_tmp_path))
    trainer.extend(Timeline(comm))
    trainer.run()
    file = shared_tmp_path / "timeline.json"
    tracks = comm.bcast_obj(trace.read(file).spans if comm.rank == 0 else None)
    for spans in tracks.values():
        for name in ("forward", "backward", "optimizer"):
            on_host = [span for span in spans if (span.track, span.name) == (MAIN, name)]
            on_gpu = [s for s in spans if s.track.startswith("GPU stream") and s.name == name]
            assert len(on_host) == len(on_gpu) >= 5
            for host, gpu in zip(on_host, on_gpu, strict=True):
                assert gpu.start > host.start - 20_000  # CUDA measures to about a microsecond
                assert gpu.end >= gpu.start
