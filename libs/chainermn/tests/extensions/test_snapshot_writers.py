"""Writers that start processes are refused in ranks; others are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from chainer.training import extensions
from chainer.training.extensions import snapshot_writers

from chainermn.agreement import run_together
from chainermn.extensions.snapshot_writers import check_writer


@pytest.mark.mpi(2)
@pytest.mark.parametrize("instead", ["ThreadWriter", "ThreadQueueWriter"])
def test_process_on_one_rank_raises_on_all(comm: Any, instead: str) -> None:
    name = instead.replace("Thread", "Process") if comm.rank == 1 else instead
    snapshot = extensions.snapshot(writer=getattr(snapshot_writers, name)())
    with pytest.raises(ValueError, match=rf"is a Process.*; use {instead} instead"):
        run_together(comm, "multi_node_snapshot", partial(check_writer, snapshot))


@pytest.mark.parametrize("writer", [None, lambda filename, outdir, target: None])
def test_other_writers_are_accepted(writer: Any) -> None:
    check_writer(extensions.snapshot(writer=writer))
    check_writer(extensions.LogReport())
