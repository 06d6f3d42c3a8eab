"""Calls on arrays and models with any input, against NumPy in one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import hypothesis.extra.numpy as npst
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from chainermn.communicators.flat_communicator import FlatCommunicator
from chainermn.communicators.hierarchical_communicator import HierarchicalCommunicator
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.naive_communicator import NaiveCommunicator
from chainermn.communicators.non_cuda_aware_communicator import NonCudaAwareCommunicator
from chainermn.communicators.single_node_communicator import SingleNodeCommunicator
from chainermn.communicators.two_dimensional_communicator import TwoDimensionalCommunicator
from chainermn.transport.topology import Topology

pytestmark = pytest.mark.each_mpi

# Strategies need the size before there is a communicator. Only the ranks draw examples.
SIZE = MPI.COMM_WORLD.size

FLOATS = ["float16", "float32", "float64"]
REALS = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(*FLOATS, "longdouble", ">i4", ">f2", ">f8"),
]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *REALS, *COMPLEX]
OPS = {
    "sum": [*REALS, *COMPLEX],
    "prod": [*REALS, *COMPLEX],
    "mean": [*FLOATS, "longdouble", ">f2", ">f8", *COMPLEX],
    "max": ["bool", *REALS],
    "min": ["bool", *REALS],
}


def backwards(x: np.ndarray) -> np.ndarray:
    turned = (..., *[slice(None, None, -1)] * x.ndim)
    return x[turned].copy()[turned]


def with_gaps(x: np.ndarray) -> np.ndarray:
    every_second = (..., *[slice(None, None, 2)] * x.ndim)
    larger = np.zeros([2 * n for n in x.shape], x.dtype)
    larger[every_second] = x
    return larger[every_second]


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def repeated(x: np.ndarray) -> np.ndarray:
    """Repeat the first element everywhere, with strides of 0."""
    return np.broadcast_to(x[(..., *[slice(1)] * x.ndim)], x.shape)


def unaligned(x: np.ndarray) -> np.ndarray:
    moved = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda x: x,
    "Fortran": lambda x: np.array(x, order="F"),
    "backwards": backwards,
    "with gaps": with_gaps,
    "read-only": read_only,
    "repeated": repeated,
    "unaligned": unaligned,
}


@dataclass(frozen=True)
class Piece:
    """An array without its values yet or, with several dtypes, a tuple of arrays."""

    shape: tuple[int, ...]
    dtype: str | tuple[str, ...]
    layout: str

    def of(self, *seed: int) -> Any:
        """Return it filled with small integers, whose sums are exact in every dtype."""
        if isinstance(self.dtype, tuple):
            parts = [Piece(self.shape[i:], d, self.layout) for i, d in enumerate(self.dtype)]
            return tuple(part.of(*seed) for part in parts)
        drawn = np.random.default_rng([*seed, *self.shape]).integers(0, 9, self.shape)
        return LAYOUTS[self.layout](np.array(drawn, self.dtype))


def one_or_several(dtypes: list[str]) -> st.SearchStrategy:
    dtype = st.sampled_from(dtypes)
    return dtype | st.lists(dtype, max_size=3).map(tuple)


def by_rank(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(*[strategy] * SIZE)


small = npst.array_shapes(min_dims=0, max_dims=3, max_side=4)
# Now and then empty, or too large for MPI to send before the receiver asks for it.
empty = npst.array_shapes(max_dims=3, min_side=0, max_side=2)
shapes = st.one_of(*[small] * 8, empty, st.just((5, 4001)))
layouts = st.sampled_from(sorted(LAYOUTS))
ranks = st.integers(0, SIZE - 1)
pieces = st.builds(Piece, shapes, one_or_several(DTYPES), layouts)


def alike(dtypes: st.SearchStrategy, one_each: st.SearchStrategy) -> st.SearchStrategy:
    """Draw pieces of the same dtypes; ``one_each`` draws their shapes and layouts."""
    return st.builds(
        lambda dtype, drawn: tuple(Piece(shape, dtype, layout) for shape, layout in drawn),
        dtypes,
        one_each,
    )


def same(actual: Any, expected: Any, *, rounded: bool = False) -> None:
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple)
        for one, other in zip(actual, expected, strict=True):
            same(one, other, rounded=rounded)
        return
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = 2 * np.finfo(expected.dtype).eps if rounded else 0
    np.testing.assert_allclose(actual, expected, rtol=tolerance)


@pytest.mark.mpi(1, 3)
@given(piece=pieces, root=ranks, elsewhere=st.none() | st.text())
def test_bcast(comm: MpiCommunicatorBase, piece: Piece, root: int, elsewhere: Any) -> None:
    expected = piece.of(root)
    same(comm.bcast(expected if comm.rank == root else elsewhere, root=root), expected)


@pytest.mark.mpi(1, 3)
@given(
    pieces=alike(one_or_several(DTYPES), by_rank(st.tuples(shapes, layouts))),
    root=ranks,
)
def test_gather_and_allgather(
    comm: MpiCommunicatorBase, pieces: tuple[Piece, ...], root: int
) -> None:
    expected = tuple(piece.of(rank) for rank, piece in enumerate(pieces))
    gathered = comm.gather(expected[comm.rank], root)
    if comm.rank == root:
        same(gathered, expected)
    else:
        assert gathered is None
    same(comm.allgather(expected[comm.rank]), expected)


@pytest.mark.mpi(1, 3)
@given(pieces=by_rank(pieces), root=ranks, kind=st.sampled_from([list, tuple]))
def test_scatter(
    comm: MpiCommunicatorBase, pieces: tuple[Piece, ...], root: int, kind: type
) -> None:
    parts = [piece.of(rank) for rank, piece in enumerate(pieces)]
    same(comm.scatter(kind(parts) if comm.rank == root else None, root), parts[comm.rank])


@pytest.mark.mpi(1, 3)
@given(shape=small, dtype=st.sampled_from(DTYPES), layout=layouts, root=ranks)
def test_scatter_of_an_array_gives_each_rank_its_row(
    comm: MpiCommunicatorBase, shape: tuple[int, ...], dtype: str, layout: str, root: int
) -> None:
    rows = Piece((comm.size, *shape), dtype, layout).of(root)
    row = comm.scatter(rows if comm.rank == root else None, root)
    same(row, np.asarray(rows[comm.rank]))


@pytest.mark.mpi(1, 3, 4)
@given(table=alike(st.sampled_from(DTYPES), st.tuples(*[st.tuples(shapes, layouts)] * SIZE**2)))
def test_alltoall(comm: MpiCommunicatorBase, table: tuple[Piece, ...]) -> None:
    def part(source: int, dest: int) -> np.ndarray:
        return table[source * comm.size + dest].of(source, dest)

    received = comm.alltoall([part(comm.rank, dest) for dest in range(comm.size)])
    same(received, tuple(part(source, comm.rank) for source in range(comm.size)))


@pytest.mark.mpi(2, 3)
@given(
    messages=st.lists(
        st.tuples(st.permutations(range(SIZE)), st.integers(0, 32766), pieces), max_size=4
    )
)
def test_send_and_recv(
    comm: MpiCommunicatorBase, messages: list[tuple[list[int], int, Piece]]
) -> None:
    for number, ((source, dest, *_), tag, piece) in enumerate(messages):
        if comm.rank == source:
            comm.send(piece.of(number), dest, tag)
        elif comm.rank == dest:
            same(comm.recv(source, tag), piece.of(number))


def reduced(op: str, arrays: tuple[Any, ...]) -> Any:
    """Combine the arrays of all ranks, with extra digits for floating-point numbers."""
    if isinstance(arrays[0], tuple):
        return tuple(reduced(op, parts) for parts in zip(*arrays, strict=True))
    dtype = arrays[0].dtype.newbyteorder("=")
    wide = {"f": "longdouble", "c": "clongdouble"}.get(dtype.kind, dtype)
    return np.asarray(getattr(np, op)(np.array(arrays, wide), axis=0)).astype(dtype)


@pytest.mark.mpi(1, 2, 3)
@given(
    op_and_dtypes=st.sampled_from(sorted(OPS)).flatmap(
        lambda op: st.tuples(st.just(op), one_or_several(OPS[op]))
    ),
    shape=shapes,
    layouts=by_rank(layouts),
)
@settings(max_examples=40)
def test_allreduce(
    comm: MpiCommunicatorBase,
    op_and_dtypes: tuple[str, Any],
    shape: tuple[int, ...],
    layouts: tuple[str, ...],
) -> None:
    op, dtype = op_and_dtypes
    everywhere = tuple(Piece(shape, dtype, layout).of(r) for r, layout in enumerate(layouts))
    own = Piece(shape, dtype, layouts[comm.rank]).of(comm.rank)
    result = comm.allreduce(own, op=op)
    same(own, everywhere[comm.rank])  # the argument is unchanged
    same(result, reduced(op, everywhere), rounded=op == "mean")


@pytest.mark.mpi(1, 3, 4)
@given(colors=by_rank(st.integers(0, 2)), keys=by_rank(st.integers(-1, 1)))
def test_split(comm: MpiCommunicatorBase, colors: tuple[int, ...], keys: tuple[int, ...]) -> None:
    own = colors[comm.rank]
    members = [rank for rank in range(comm.size) if colors[rank] == own]
    members.sort(key=lambda rank: (keys[rank], rank))
    part = comm.split(own, keys[comm.rank])
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.allgather_obj(comm.rank) == members
    same(part.allreduce(np.array(comm.rank)), np.array(sum(members)))
    part.finalize()


@dataclass(frozen=True)
class Parameter:
    """A parameter, or its gradient, on every rank."""

    shape: tuple[int, ...]
    dtype: str
    layouts: tuple[str, ...]
    present: tuple[bool, ...]

    def of(self, *seed: int) -> np.ndarray:
        return Piece(self.shape, self.dtype, self.layouts[seed[0]]).of(*seed)


models = st.lists(
    st.builds(
        Parameter, shapes, st.sampled_from(FLOATS), by_rank(layouts), by_rank(st.booleans())
    ),
    max_size=4,
)


def make_model(parameters: list[chainer.Parameter]) -> chainer.Chain:
    model = chainer.Chain()
    with model.init_scope():
        for index, parameter in enumerate(parameters):
            setattr(model, f"p{index}", parameter)
    return model


@pytest.mark.mpi(1, 3)
@given(model=models)
def test_bcast_data(comm: MpiCommunicatorBase, model: list[Parameter]) -> None:
    own = [chainer.Parameter() for _ in model]
    for index, (parameter, described) in enumerate(zip(own, model, strict=True)):
        if described.present[comm.rank]:
            parameter.array = described.of(comm.rank, index)
    comm.bcast_data(make_model(own))
    for index, (parameter, described) in enumerate(zip(own, model, strict=True)):
        if any(described.present):
            same(parameter.array, described.of(described.present.index(True), index))
        else:
            assert parameter.array is None


KINDS = [
    FlatCommunicator,
    HierarchicalCommunicator,
    NaiveCommunicator,
    NonCudaAwareCommunicator,
    SingleNodeCommunicator,
    TwoDimensionalCommunicator,
]
EPSILON = {"bfloat16": 2**-8, **{dtype: float(np.finfo(dtype).eps) for dtype in FLOATS}}
PLACES = sorted({hosts[:SIZE] for hosts in ("aaaa", "aabb", "abab", "abbb", "abcd")})


def runs_on(kind: type, hosts: str) -> bool:
    if kind is SingleNodeCommunicator:
        return len(set(hosts)) == 1
    return kind is not TwoDimensionalCommunicator or len({*map(hosts.count, hosts)}) == 1


@pytest.fixture
def communicator_of() -> Callable[[type, str], MpiCommunicatorBase]:
    """Return a function that makes one communicator for each kind and each layout of hosts."""

    @functools.cache
    def make(kind: type, hosts: str) -> MpiCommunicatorBase:
        return kind(MPI.COMM_WORLD, topology=Topology.from_hosts(hosts, MPI.COMM_WORLD.rank))

    return make


@pytest.mark.mpi(1, 2, 3, 4)
@given(
    kind_and_hosts=st.sampled_from([(k, h) for k in KINDS for h in PLACES if runs_on(k, h)]),
    wire=st.sampled_from([None, "bfloat16", *FLOATS]),
    zero_fill=st.booleans(),
    gradients=models,
)
@settings(max_examples=40)
def test_multi_node_mean_grad(
    communicator_of: Callable[[type, str], MpiCommunicatorBase],
    kind_and_hosts: tuple[type, str],
    wire: str | None,
    zero_fill: bool,
    gradients: list[Parameter],
) -> None:
    comm = communicator_of(*kind_and_hosts)
    comm.set_config("allreduce_grad_dtype", wire)

    def gradient(index: int, rank: int) -> np.ndarray | None:
        described = gradients[index]
        # Without zero_fill, all ranks must have the same gradients.
        present = described.present[rank if zero_fill else 0]
        return described.of(rank, index) if present else None

    own = [chainer.Parameter(np.zeros(d.shape, d.dtype)) for d in gradients]
    for index, parameter in enumerate(own):
        parameter.grad = gradient(index, comm.rank)
    comm.multi_node_mean_grad(make_model(own), zero_fill=zero_fill)
    for index, parameter in enumerate(own):
        everywhere = [gradient(index, rank) for rank in range(comm.size)]
        if not zero_fill and everywhere[0] is None:
            assert parameter.grad is None
            continue
        zeros = np.zeros(parameter.shape, "f8")
        mean = np.mean([zeros if g is None else g.astype("f8") for g in everywhere], axis=0)
        assert parameter.grad.dtype == parameter.dtype
        coarsest = max(EPSILON[parameter.dtype.name], EPSILON[wire or parameter.dtype.name])
        np.testing.assert_allclose(parameter.grad, mean, rtol=2 * coarsest)
        for other in comm.allgather(parameter.grad):
            same(other, parameter.grad)  # bit for bit


@dataclass(frozen=True)
class Model:
    """A description of a model, which a failing test can show."""

    shapes: tuple[tuple[int, ...], ...] = ((2, 3), ())
    dtype: str = "float32"
    missing_gradients: int = 0

    def make(self) -> chainer.Chain:
        own = [chainer.Parameter(np.zeros(shape, self.dtype)) for shape in self.shapes]
        for parameter in own[self.missing_gradients :]:
            parameter.grad = np.ones_like(parameter.array)
        return make_model(own)


GOOD = np.ones((2, 3), "float32")


def arguments(call: str, root: int) -> dict[str, Any]:
    """Return valid arguments for a call."""
    array, parts = {"x": GOOD}, {"xs": [GOOD] * SIZE}
    return {
        "bcast": {**array, "root": root},
        "gather": {**array, "root": root},
        "allgather": array,
        "scatter": {**parts, "root": root},
        "alltoall": parts,
        "allreduce": {**array, "op": "sum"},
        "bcast_obj": {"obj": 1, "root": root},
        "gather_obj": {"obj": 1, "root": root},
        "allgather_obj": {"obj": 1},
        "allreduce_obj": {"obj": 1},
        "scatter_obj": {"objs": [1] * SIZE, "root": root},
        "split": {"color": 0, "key": 0},
        "bcast_data": {"model": Model(), "persistent": False},
        "multi_node_mean_grad": {"model": Model(), "zero_fill": False},
    }[call]


def other_than(good: Any, strategy: st.SearchStrategy) -> st.SearchStrategy:
    return strategy.filter(lambda drawn: drawn != good)


no_numbers = st.one_of(st.none(), st.text(), st.floats(), st.lists(st.integers()), st.just(GOOD))
no_arrays = st.one_of(
    *(st.none(), st.text(), st.integers(), st.lists(st.floats(), min_size=1)),
    st.sampled_from(["O", "S3", "U2", "M8[s]", "m8[s]", "V4"]).map(lambda d: np.zeros((2, 3), d)),
    st.sampled_from([True, False]).map(lambda mask: np.ma.masked_array(GOOD, mask)),
)
no_arrays |= st.tuples(st.just(GOOD), no_arrays)
other_dtypes = other_than("float32", st.sampled_from(DTYPES)).map(lambda d: GOOD.astype(d))
other_shapes = other_than(GOOD.shape, small).map(lambda shape: np.ones(shape, "f"))
tuples = st.builds(
    lambda kind, n: kind([GOOD] * n), st.sampled_from([tuple, list]), st.integers(0, 3)
)
wrong_roots = st.integers() | st.integers(-2, SIZE + 1) | no_numbers
no_parts = st.one_of(
    *(st.none(), st.text(), st.integers(), st.just(np.array(1.0))),
    other_than(SIZE, st.integers(0, 6)).map(lambda n: [GOOD] * n),
    other_than(SIZE, st.integers(0, 6)).map(lambda n: np.ones((n, 2))),
)


def one_wrong_part(wrong: st.SearchStrategy) -> st.SearchStrategy:
    return st.builds(lambda n, part: [*[GOOD] * n, part, *[GOOD] * (SIZE - n - 1)], ranks, wrong)


no_pickles = st.sampled_from([threading.Lock(), lambda: None])
wrong_models = st.one_of(
    *(st.none(), st.text()),
    st.builds(Model, other_than(Model.shapes, st.lists(small, max_size=3).map(tuple))),
    st.builds(Model, dtype=st.sampled_from(["float16", "float64"])),
)

WRONG = {
    "bcast": {"x": no_arrays, "root": wrong_roots},
    "gather": {"x": no_arrays | other_dtypes | tuples, "root": wrong_roots},
    "allgather": {"x": no_arrays | other_dtypes | tuples},
    "scatter": {"xs": no_parts | one_wrong_part(no_arrays), "root": wrong_roots},
    "alltoall": {"xs": no_parts | one_wrong_part(no_arrays | other_dtypes | tuples)},
    "allreduce": {
        "x": no_arrays | other_dtypes | other_shapes | tuples,
        "op": other_than("sum", st.text()) | st.sampled_from([*OPS][1:]) | st.none() | st.just([]),
    },
    "bcast_obj": {"obj": no_pickles, "root": wrong_roots},
    "gather_obj": {"obj": no_pickles, "root": wrong_roots},
    "allgather_obj": {"obj": no_pickles},
    "allreduce_obj": {"obj": no_pickles},
    "scatter_obj": {"objs": no_parts | one_wrong_part(no_pickles), "root": wrong_roots},
    "split": {
        "color": no_numbers | st.integers(max_value=-1) | st.just(2**31),
        "key": no_numbers | st.sampled_from([-(2**31) - 1, 2**31]),
    },
    "bcast_data": {"model": wrong_models, "persistent": st.just(True)},
    "multi_node_mean_grad": {
        "model": wrong_models | st.builds(Model, missing_gradients=st.integers(1, 2)),
        "zero_fill": st.just(True),
    },
}


# One test per argument: if ranks hang, only the test's name tells why.
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize(
    ("call", "argument"), [(call, name) for call, names in WRONG.items() for name in names]
)
@given(data=st.data(), culprit=ranks)
@settings(max_examples=12)
def test_wrong_input_of_one_rank_raises_on_all(
    comm: MpiCommunicatorBase, call: str, argument: str, data: st.DataObject, culprit: int
) -> None:
    wrong = data.draw(WRONG[call][argument])
    # The culprit is the root, because bcast and scatter ignore what other ranks pass.
    given_here = arguments(call, root=culprit)
    assume(argument != "root" or repr(wrong) != repr(culprit))
    if comm.rank == culprit:
        given_here[argument] = wrong
    given_here = {k: v.make() if isinstance(v, Model) else v for k, v in given_here.items()}
    message = None
    try:
        getattr(comm, call)(**given_here)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    messages = MPI.COMM_WORLD.allgather(message)
    seen = f"{argument}={wrong!r} on rank {culprit}, raised by rank: {messages}"
    assert messages == [message] * comm.size, seen
    assert message is not None, seen
    assert message.startswith((f"TypeError: {call}: ", f"ValueError: {call}: ")), seen
    assert f"rank {culprit}" in message, seen
    same(comm.allreduce(GOOD), GOOD * comm.size)  # nothing is left pending


@pytest.mark.mpi(2, 3)
@given(
    call_and_wrong=st.tuples(st.just("send"), no_arrays)
    | st.tuples(st.just("send_obj"), no_pickles),
    pair=st.permutations(range(SIZE)),
)
def test_wrong_message_raises_on_both_sides(
    comm: MpiCommunicatorBase, call_and_wrong: tuple[str, Any], pair: list[int]
) -> None:
    call, wrong = call_and_wrong
    source, dest, *_ = pair
    if comm.rank == source:
        with pytest.raises(TypeError, match=f"{call} to rank {dest}: rank {source}: "):
            getattr(comm, call)(wrong, dest)
    elif comm.rank == dest:
        match = f"{call.replace('send', 'recv')} on rank {dest}: rank {source}: "
        with pytest.raises(TypeError, match=match):
            getattr(comm, call.replace("send", "recv"))(source)
    same(comm.allreduce(GOOD), GOOD * comm.size)
