"""Steps that a CUDA graph may record, on several ranks."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import chainer
import chainer.functions as F
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn import spans
from chainermn.communicators import registered
from chainermn.compression import TopK
from chainermn.functions import multi_node_batch_normalization
from chainermn.gradients.batched_copy import BatchedCopy
from chainermn.optimizers import LocalSGD
from chainermn.profiling.timeline.gpu_streams import GpuStreams
from chainermn.transport.gpu import device
from chainermn.transport.topology import Topology

WORLD = MPI.COMM_WORLD
GIVE_UP, EAGER, RECORD, CHECK, REPLAY = range(5)
WISHES = [EAGER, RECORD, CHECK, REPLAY]


class CountedMpi(MPI.Intracomm):
    """A communicator that counts calls by name."""

    counts: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            CountedMpi.counts[name] += 1
        return found


class Graphs:
    """Does on a stream what a CUDA graph would, and computes again where one would be launched."""

    def __init__(self, stand_in: Any, wishes: list[int]) -> None:
        self.wishes, self.agreed = wishes, []
        self.reasons: Any = None
        self.stream = stand_in.new_stream()
        self._stand_in = stand_in
        self.loss_scale = None

    def update(self, steps: Any, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
        if self.reasons is not None:
            steps.eager(lossfun, args, kwds)
            return
        self.steps, reason = steps, steps.why_not()
        wish = self.wishes.pop(0) if reason is None else GIVE_UP
        self.agreed.append(steps.agree(wish))
        if self.agreed[-1] == GIVE_UP:
            self.reasons = steps.reasons(reason)
        if self.agreed[-1] <= EAGER:
            steps.eager(lossfun, args, kwds)
            return
        before = CountedMpi.counts.total(), looks()
        begun = self._stand_in.record()
        with self._stand_in.on(self.stream):
            self._stand_in.wait_for(begun)
            steps.gradients(lossfun, args, kwds, self.loss_scale)
            done = self._stand_in.record()
        assert before == (CountedMpi.counts.total(), looks())
        done.Wait()
        with steps.launching() if self.agreed[-1] == REPLAY else contextlib.nullcontext():
            steps.optimizer.update(None)


def looks() -> int:
    import stand_in_gpu

    return stand_in_gpu.GpuArray.looks


class _Same(chainer.FunctionNode):
    """An identity that keeps gradients in the value's kind of memory, unlike NumPy's functions."""

    def forward(self, inputs: Any) -> Any:
        self._kind = type(inputs[0])
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        return (chainer.Variable(grad_outputs[0].array.view(self._kind)),)


class Model(chainer.Chain):
    def __init__(self, place: Callable[[Any], Any], normalize: Any = None) -> None:
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(place(np.array([[1.0, -2.0, 0.5]])))
            self.b = chainer.Parameter(place(np.array([0.5, 0.25, -1.0])))
            self.unused = chainer.Parameter(place(np.ones(5)))
            if normalize is not None:
                self.gamma = chainer.Parameter(place(np.array([1.0, 2.0, 0.5])))
                self.beta = chainer.Parameter(place(np.zeros(3)))
        self.place, self.normalize = place, normalize

    def forward(self, x: Any) -> Any:
        h = F.broadcast_to(self.w, x.shape) * self.place(x)
        if self.normalize is not None:
            gamma, beta = (_Same().apply((one,))[0] for one in (self.gamma, self.beta))
            h = self.normalize(h, gamma, beta)
        h = h + F.broadcast_to(self.b, x.shape)
        return F.sum(h * h * h) * (1 / len(x))


def batch(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=(4, 3))


def make(name: str = "pure_nccl", hosts: str = "", **settings: Any) -> Any:
    place = Topology.from_hosts(hosts or "a" * WORLD.size, WORLD.rank)
    settings.setdefault("allreduce_grad_dtype", "float64")
    return registered()[name](CountedMpi(WORLD), topology=place, **settings)


@pytest.fixture
def comm(stand_in: Any) -> Iterator[Any]:
    found = make()
    yield found
    found.finalize()


def prepare(
    stand_in: Any, comm: Any, wishes: list[int], model: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Return an optimizer with graphs whose replicas are equal, and the graphs."""
    model = Model(stand_in.to_gpu) if model is None else model
    actual = chainer.optimizers.MomentumSGD(0.01)
    graphs = actual.cuda_graphs = Graphs(stand_in, wishes)  # type: ignore[attr-defined]
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, **settings).setup(model)
    optimizer.update(model, batch(comm.rank, 0))
    assert optimizer.t == 0
    return optimizer, graphs


def in_one_process(n_ranks: int, steps: range, normalize: Any = None) -> dict[str, Any]:
    model = Model(np.asarray, normalize)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    for step in steps:
        x = np.concatenate([batch(rank, step) for rank in range(n_ranks)])
        optimizer.update(model, x)
    return {name: parameter.array for name, parameter in model.namedparams()}


def assert_equal(model: Any, expected: dict[str, Any]) -> None:
    for name, parameter in model.namedparams():
        np.testing.assert_allclose(parameter.array, expected[name], rtol=1e-12, err_msg=name)


@pytest.mark.mpi(1, 2, 3)
@pytest.mark.parametrize("overlap", [False, True])
def test_same_as_in_one_process(stand_in: Any, comm: Any, overlap: bool) -> None:
    optimizer, graphs = prepare(stand_in, comm, list(WISHES), overlap=overlap)
    for step in range(1, 5):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    assert graphs.agreed == WISHES
    assert_equal(optimizer.target, in_one_process(comm.size, range(1, 5)))


@pytest.mark.mpi(2)
def test_batch_normalization(stand_in: Any, comm: Any) -> None:
    def normalize(h: Any, gamma: Any, beta: Any) -> Any:
        return multi_node_batch_normalization(h, gamma, beta, comm)

    optimizer, graphs = prepare(stand_in, comm, list(WISHES), Model(stand_in.to_gpu, normalize))
    graphs.stream = None  # on others, NumPy would read sums before the stand-in has added up
    for step in range(1, 5):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    assert graphs.agreed == WISHES
    assert_equal(optimizer.target, in_one_process(2, range(1, 5), F.batch_normalization))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_layers_that_exchange_by_mpi_raise_before_they_wait(
    stand_in: Any, comm: Any, backend: Any
) -> None:
    def normalize(h: Any, gamma: Any, beta: Any) -> Any:
        return multi_node_batch_normalization(h, gamma, beta, comm, communication_backend=backend)

    model = Model(stand_in.to_gpu, normalize)
    # While gradients are exchanged in the background, layers use MPI.
    optimizer, _ = prepare(stand_in, comm, [EAGER, RECORD], model, overlap=backend == "auto")
    optimizer.update(model, batch(comm.rank, 1))
    with pytest.raises(RuntimeError, match=r"the host would wait for the GPU .* 'pure_nccl'"):
        optimizer.update(model, batch(comm.rank, 2))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_agree_on_the_lowest_wish(stand_in: Any, comm: Any, overlap: bool) -> None:
    wishes = [[EAGER, RECORD, REPLAY, REPLAY], [EAGER, REPLAY, EAGER, REPLAY]][comm.rank]
    optimizer, graphs = prepare(stand_in, comm, wishes, overlap=overlap)
    for step in range(1, 5):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    assert graphs.agreed == [EAGER, RECORD, EAGER, REPLAY]
    assert_equal(optimizer.target, in_one_process(comm.size, range(1, 5)))


@pytest.mark.mpi(2)
def test_a_rank_that_gives_up_is_named(
    stand_in: Any, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY] * 3)
    optimizer.update(optimizer.target, batch(comm.rank, 1))  # connects the ranks
    monkeypatch.setattr(chainer.config, "debug", comm.rank == 1)
    with pytest.raises(ValueError, match="debug=True"):
        optimizer.update(optimizer.target, batch(comm.rank, 2))
    assert graphs.agreed == [EAGER, GIVE_UP]
    assert graphs.steps.n_ranks == 2
    with pytest.warns(UserWarning, match="graphs are off") if comm.rank == 0 else nullcontext():
        graphs.steps.tell("graphs are off")
    assert graphs.reasons == {1: "Chainer's debug mode looks at gradients on the host"}


@pytest.mark.mpi(2)
def test_parameters_in_host_memory(stand_in: Any, comm: Any) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY], Model(np.asarray))
    for step in range(1, 3):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    assert graphs.reasons == dict.fromkeys((0, 1), "some parameters are in host memory")
    assert_equal(optimizer.target, in_one_process(comm.size, range(1, 3)))


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"accumulate": 2}, "accumulate=2"),
        ({"uneven": True}, "uneven=True"),
        ({"zero_fill": False}, "zero_fill=False"),
        ({"compression": TopK(density=0.2, min_size=2)}, "compression=TopK("),
        ({"double_buffering": True}, "double_buffering=True"),
        ({"local": LocalSGD(period=2)}, "local=LocalSGD(period=2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_without_graphs(
    stand_in: Any, comm: Any, settings: dict[str, Any], reason: str
) -> None:
    """Find out without a collective: ranks may be in different updates."""
    optimizer, graphs = prepare(stand_in, comm, [], **settings)
    CountedMpi.counts.clear()
    agree = graphs.update
    called: list[Any] = []

    def update(steps: Any, *args: Any) -> None:
        called.append((steps.why_not(), steps.agree(GIVE_UP), steps.reasons(None)))

    graphs.update = update
    optimizer.update(optimizer.target, batch(comm.rank, 1))
    assert not CountedMpi.counts
    ((why_not, agreed, reasons),) = called
    assert why_not.startswith(reason)
    assert (agreed, reasons) == (GIVE_UP, {0: why_not})
    graphs.update = agree
    optimizer.update(optimizer.target, batch(comm.rank, 2))
    assert graphs.reasons == reasons
    getattr(optimizer, "wait", lambda: None)()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("name", "hosts"),
    [("naive", "aa"), ("hierarchical", "ab")],
)
def test_communicators_that_use_host_memory(stand_in: Any, name: str, hosts: str) -> None:
    comm = make(name, hosts)
    optimizer, graphs = prepare(stand_in, comm, [])
    for step in range(1, 3):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    kind = type(comm).__name__
    assert graphs.reasons == {
        0: f"on these hosts, {kind} sends gradients of this model through host memory"
    }
    assert_equal(optimizer.target, in_one_process(comm.size, range(1, 3)))
    comm.finalize()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", ["single_node", "hierarchical"])
def test_communicators_that_use_nccl_inside_a_host(stand_in: Any, name: str) -> None:
    comm = make(name)
    optimizer, graphs = prepare(stand_in, comm, list(WISHES))
    for step in range(1, 5):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    assert graphs.agreed == WISHES
    assert_equal(optimizer.target, in_one_process(comm.size, range(1, 5)))
    comm.finalize()


@pytest.mark.mpi(2)
def test_overlap_in_another_thread(stand_in: Any) -> None:
    comm = make("single_node")
    optimizer, graphs = prepare(stand_in, comm, [], overlap=True)
    optimizer.update(optimizer.target, batch(comm.rank, 1))
    assert graphs.reasons == {0: "SingleNodeCommunicator overlaps in another thread"}
    comm.finalize()


# ---- what has to be settled first ----


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_new_parameters_and_snapshots(
    stand_in: Any, comm: Any, overlap: bool, tmp_path: Path
) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY] * 9, overlap=overlap)
    model = optimizer.target
    optimizer.update(model, batch(comm.rank, 1))
    optimizer.update(model, batch(comm.rank, 2))
    # Only what ranks have exchanged before can be recorded.
    assert graphs.agreed == [EAGER, REPLAY]
    with model.init_scope():
        model.further = chainer.Parameter(stand_in.to_gpu(np.ones(2)))
    model.further.update_rule = optimizer.create_update_rule()
    optimizer.update(model, batch(comm.rank, 3))  # makes the replicas equal
    assert (graphs.agreed[-1], optimizer.t) == (EAGER, 2)
    for step in range(3, 6):
        optimizer.update(model, batch(comm.rank, step))
    assert graphs.agreed[-3:] == [EAGER, REPLAY, REPLAY]
    chainer.serializers.save_npz(tmp_path / f"{comm.rank}.npz", optimizer)
    chainer.serializers.load_npz(tmp_path / f"{comm.rank}.npz", optimizer)
    for step in range(6, 8):
        optimizer.update(model, batch(comm.rank, step))
    assert (graphs.agreed[-2:], optimizer.t) == ([EAGER, REPLAY], 7)
    del model.further
    assert_equal(model, in_one_process(comm.size, range(1, 8)))


@pytest.mark.mpi(2)
def test_end_of_an_epoch_compares_replicas(stand_in: Any, comm: Any) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY] * 5)
    model = optimizer.target
    for step in range(1, 3):
        optimizer.update(model, batch(comm.rank, step))
    optimizer.new_epoch()
    for step in range(3, 5):
        optimizer.update(model, batch(comm.rank, step))
    assert graphs.agreed == [EAGER, REPLAY, EAGER, REPLAY]
    optimizer.new_epoch()
    model.w.array[...] += comm.rank
    with pytest.raises(ValueError, match="the replicas are no longer equal: /w differs"):
        optimizer.update(model, batch(comm.rank, 5))


@pytest.mark.mpi(2)
def test_settings_that_differ_raise_on_all_ranks(stand_in: Any, comm: Any) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY] * 3)
    for step in range(1, 3):
        optimizer.update(optimizer.target, batch(comm.rank, step))
    optimizer.lr = 0.1 * (1 + comm.rank)
    with pytest.raises(ValueError, match=r"lr differs .*: 0.1 on rank 0, 0.2 on rank 1"):
        optimizer.update(optimizer.target, batch(comm.rank, 3))
    assert graphs.agreed == [EAGER, REPLAY, EAGER]


@pytest.mark.mpi(2)
def test_another_dtype_on_the_wire(stand_in: Any, comm: Any) -> None:
    optimizer, graphs = prepare(stand_in, comm, [REPLAY] * 5)
    model = optimizer.target
    for step in range(1, 5):
        if step == 3:
            comm.set_config("allreduce_grad_dtype", "float32")
        optimizer.update(model, batch(comm.rank, step))
    assert graphs.agreed == [EAGER, REPLAY, EAGER, REPLAY]
    comm.set_config("allreduce_grad_dtype", ("float64", "float32")[comm.rank])
    with pytest.raises(ValueError, match="allreduce_grad_dtype=float32"):
        optimizer.update(model, batch(comm.rank, 5))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_on_one_rank_only(stand_in: Any, comm: Any, overlap: bool) -> None:
    actual = chainer.optimizers.SGD()
    if comm.rank:
        actual.cuda_graphs = Graphs(stand_in, [])  # type: ignore[attr-defined]
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, overlap=overlap)
    optimizer.setup(Model(stand_in.to_gpu))
    with pytest.raises(ValueError, match=r"rank 1: .*cuda_graphs=True"):
        optimizer.update(optimizer.target, batch(comm.rank, 0))
    actual.cuda_graphs = None  # type: ignore[attr-defined]
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    if comm.rank:
        actual.cuda_graphs = Graphs(stand_in, [EAGER])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"some ranks use CUDA graphs .* CHAINER_CUDA_GRAPHS=1"):
        optimizer.update(optimizer.target, batch(comm.rank, 1))


# ---- what a recorded step must not do ----


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_loss_scale_in_gpu_memory(stand_in: Any, comm: Any, overlap: bool) -> None:
    optimizer, graphs = prepare(stand_in, comm, [EAGER, REPLAY, REPLAY], overlap=overlap)
    model, reads = optimizer.target, []

    class Placed(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return (stand_in.to_gpu(inputs[0]),)

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            return grad_outputs

    def loss(x: Any) -> Any:
        return Placed().apply((model(x),))[0]

    class Scaled(type(optimizer.actual_optimizer)):  # type: ignore[misc]
        @property
        def _loss_scale(self) -> None:
            reads.append(graphs.agreed[-1:])

    optimizer.update(model, batch(comm.rank, 1))
    graphs.loss_scale = stand_in.to_gpu(np.array(8.0))
    optimizer.actual_optimizer._loss_scaling_is_dynamic = True  # only then the GPU changes it
    optimizer.actual_optimizer.check_nan_in_grads = lambda: None
    optimizer.actual_optimizer.update_loss_scale = lambda: None
    optimizer.actual_optimizer.__class__ = Scaled
    for step in range(2, 4):
        optimizer.update(loss, batch(comm.rank, step))
        assert all(p._loss_scale is graphs.loss_scale for p in model.params())
    assert not reads
    assert_equal(model, in_one_process(comm.size, range(1, 4)))


@pytest.mark.mpi(2)
def test_overlapped_gradients_that_change_raise_after_the_exchange(
    stand_in: Any, comm: Any
) -> None:
    model = Model(stand_in.to_gpu)
    with model.init_scope():
        model.offset = chainer.Parameter(stand_in.to_gpu(np.zeros((4, 3))))
    optimizer, _ = prepare(stand_in, comm, [EAGER, RECORD], model, overlap=True)

    class Changing(chainer.FunctionNode):
        def forward(self, inputs: Any) -> Any:
            return inputs

        def backward(self, indexes: Any, grad_outputs: Any) -> Any:
            if comm.rank:
                model.offset.grad = model.offset.grad + 1
            return grad_outputs

    def loss(x: Any, changes: bool) -> Any:
        h = F.broadcast_to(model.w, x.shape) * stand_in.to_gpu(x)
        (h,) = Changing().apply((h,)) if changes else (h,)
        return F.sum((h + model.offset) * (h + model.offset))

    optimizer.update(loss, batch(comm.rank, 1), False)
    try:
        optimizer.update(loss, batch(comm.rank, 2), True)
    except RuntimeError as error:
        assert comm.rank == 1
        assert "rank 1: gradients changed" in str(error)
    else:
        assert comm.rank == 0
    for stream in stand_in.streams:
        with stand_in.on(stream):
            stand_in.record().Wait()
    assert not stand_in.library.in_flight


def test_table_of_addresses_belongs_to_the_graph(stand_in: Any) -> None:
    arrays = [stand_in.to_gpu(np.arange(3, dtype="f")), stand_in.to_gpu(np.ones(2, "f"))]
    copy = BatchedCopy(stand_in, [3, 2], [np.dtype("f")] * 2, np.dtype("f"))
    buffer = stand_in.empty(copy.length, np.dtype("f"))
    stand_in.log.clear()
    for _ in range(2):
        copy.gather(arrays, buffer)
    with device.recordable():
        for _ in range(2):
            copy.gather(arrays, buffer)
    copy.gather(arrays, buffer)
    gather = "gather_float32_float32"
    assert stand_in.log == ["upload", gather, gather, *["upload", gather] * 2, gather]


def test_uploads_of_graphs_read_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import stand_in_cupy

    cupy = stand_in_cupy.StandInCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    gpu, given = device.Gpu(), np.arange(6.0).reshape(2, 3)
    with device.recordable():
        found = gpu.upload(given)
        gpu.upload(np.ones(6))
    assert found.shape == (2, 3)
    given[...] = 0
    cupy.launch()
    np.testing.assert_array_equal(found, np.arange(6.0).reshape(2, 3))
    for event in gpu.record(), gpu.timed_event():
        with device.recordable():
            for wait in event.Test, event.Wait:
                with pytest.raises(RuntimeError, match="the host would wait"):
                    wait()
        assert event.Test()


@pytest.mark.mpi(1)
def test_timeline(stand_in: Any, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show when a graph was launched; measure no streams inside."""
    optimizer, _ = prepare(stand_in, comm, [EAGER, RECORD, REPLAY])
    marks: list[bool] = []

    class Streams(GpuStreams):
        def __init__(self) -> None: ...

        def mark(self) -> Any:
            marks.append(device.is_recordable())
            return super().mark() if device.is_recordable() else (0, None)

        def add(self, *args: Any) -> None: ...

    found: list[spans.Span] = []
    spans.listen(found.append)
    spans.measure_streams(Streams())
    try:
        for step in range(1, 4):
            optimizer.update(optimizer.target, batch(comm.rank, step))
    finally:
        spans.unlisten(found.append)
        spans.measure_streams(None)
    names = [span.name for span in found]
    assert names.count("CUDA graph") == 1
    assert names[-1] == "CUDA graph"
    assert True in marks
