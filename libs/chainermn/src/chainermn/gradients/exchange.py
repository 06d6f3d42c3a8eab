"""Exchange gradients: replace each gradient with its mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from chainermn import spans
from chainermn.agreement import agree
from chainermn.failures.activity import Group, collective
from chainermn.gradients.bucket import Bucket, Buffers, flat_gradients, gpu_zeros
from chainermn.gradients.buckets import Limits, Wire, make_buckets
from chainermn.gradients.embeddings import embeddings_of
from chainermn.gradients.parameters import (
    Agreement,
    Proposal,
    check_overflow,
    fill_missing_gradients,
)
from chainermn.gradients.step import Step
from chainermn.transport.collectives import Algorithm, Collectives, wait_for
from chainermn.transport.duplicates import Duplicate
from chainermn.transport.gpu.device import recordable, the_gpu
from chainermn.transport.gpu.reducers import GpuReducers
from chainermn.transport.gpu.transports import GpuTransports
from chainermn.transport.host.arithmetic import FLOAT16
from chainermn.transport.host.reducers import HostReducers
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainer.variable import VariableNode
    from mpi4py import MPI

    from chainermn.gradients.compressor import Compressor
    from chainermn.transport.topology import Topology

# Measured: on one host, larger buckets only take longer to copy. On a link of 1 Gbit/s, smaller
# buckets add latency.
_BUCKET_BYTES_ON_ONE_HOST = 1 << 18
_BUCKET_BYTES = 1 << 22

# More models than share a communicator in practice, such as the two of a GAN.
_MOST_MODELS = 16


def size_of(gradients: Sequence[Array]) -> Mapping[str, int]:
    """Return the size of a bucket for its span; empty if spans are not recorded."""
    if not spans.are_wanted():
        return {}
    return {"gradients": len(gradients), "bytes": sum(one.nbytes for one in gradients)}


class GradientExchange:
    """Averages the gradients of models over the ranks of ``mpi_comm``.

    ``group`` identifies these ranks for the watch.

    Attributes
    ----------
    has_duplicates : bool
        Whether some gradients may be exchanged beside the script, by a duplicate.
    has_averaged : bool
        Whether the gradients of any model have been averaged, also by a duplicate.
    wire_dtype : dtype or None
        Dtype, set by the user, to which gradients are rounded before they are sent. None means
        the default.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        topology: Topology,
        transports: GpuTransports,
        algorithm: type[Algorithm],
        group: Group,
    ) -> None:
        self.mpi_comm = mpi_comm
        self.topology = topology
        self.algorithm = algorithm
        self.wire_dtype: np.dtype[Any] | None = None
        self.has_duplicates = self.has_averaged = False
        self.group = group
        #: Track of the timeline that shows its spans, unless the running thread does.
        self.track: str | None = None
        self._transports = transports
        self._host = HostReducers(mpi_comm, topology)
        by_nccl = algorithm.everyone_by_nccl
        self._gpu = GpuReducers(transports, topology, self._host, everyone_by_nccl=by_nccl)
        self._buffers: Buffers = {}
        self._buckets: dict[Hashable, Sequence[Bucket]] = {}
        # Memory that CUDA graphs use.
        self._recorded: list[Any] = []

    def wire_with(self, compressor: Compressor | None) -> Wire:
        """Return the form in which gradients are sent with the current settings."""
        phase = None if compressor is None else compressor.phase
        if self.topology.size == 1:
            return Wire(None, None, phase)
        gpu = self.wire_dtype
        if gpu is None and self.algorithm.uses_nccl:
            config = chainer.global_config.dtype
            gpu = FLOAT16 if config is chainer.mixed16 else np.dtype(config)
        # Gradients in host memory that never leave their host do not need rounding.
        return Wire(self.wire_dtype if self.topology.inter_size > 1 else None, gpu, phase)

    @collective("update")
    def agree(self, step: Step) -> Step:
        """Return what any rank tells about a step. Collective."""
        return Step.of_all(agree(self.mpi_comm, None, step.to_integers())[1])

    @collective("multi_node_mean_grad")
    def mean(
        self,
        model: chainer.Link,
        zero_fill: bool,
        step: Step = Step(),  # noqa: B008 - never changed
        compressor: Compressor | None = None,
    ) -> Step:
        """Replace every gradient of ``model`` with its mean over the ranks. Collective.

        If the step pauses on any rank, nothing is exchanged. With a ``compressor``, the gradients
        are compressed, even on a single rank.

        Returns
        -------
        Step
            What any rank tells about the step.

        Raises
        ------
        TypeError, ValueError, OverflowError
            For the reasons given in `CommunicatorBase.multi_node_mean_grad`, on every rank.
        """
        wire = self.wire_with(compressor)
        proposal = Proposal(model, zero_fill, wire.gpu, step)
        self._host.maximum(proposal.packed)
        agreed = proposal.agreed(self.mpi_comm)
        self.has_averaged |= not agreed.step.pauses
        if agreed.step.pauses or (self.topology.size == 1 and compressor is None):
            return agreed.step
        buckets = self._buckets_for(agreed, wire, compressor, model)
        self.average(agreed.parameters, buckets, wire)
        self.check_overflow(model, buckets, [self])
        if compressor is not None:
            compressor.commit(buckets, agreed.parameters)
        return agreed.step

    @property
    def key(self) -> Hashable:
        """What an exchange that a CUDA graph has recorded depends on."""
        return self.wire_with(None)

    def waits_for_gpu(self, model: chainer.Link) -> bool:
        """Tell whether the host waits for the GPU when it averages gradients in GPU memory."""
        if self.topology.size == 1:
            return False
        algorithm = self.algorithm
        is_one_allreduce = self.topology.inter_size == 1 or algorithm.average is Algorithm.average
        is_by_nccl = algorithm.everyone_by_nccl and is_one_allreduce
        return not is_by_nccl or bool(self.embeddings_of(model))

    @collective("update")
    def agree_ahead(self, model: chainer.Link, step: Step) -> Agreement:
        """Agree on the gradients that `repeat` averages, missing ones as zeros. Collective.

        Returns
        -------
        Agreement
            Gradients of all initialized parameters, in GPU memory. There are none if ranks differ,
            have to settle something first, or have not exchanged the same before.
        """
        wire = self.wire_with(None)
        proposal = Proposal(model, zero_fill=True, wire_dtype=wire.gpu, step=step)
        self._host.maximum(proposal.packed)
        agreed = proposal.agreed_ahead()
        is_known = self.topology.size == 1 or (agreed.description, wire, ()) in self._buckets
        return agreed if is_known else Agreement(agreed.step)

    def repeat(self, agreed: Agreement, compute: Callable[[], None]) -> None:
        """Compute gradients and average them; a CUDA graph may record what this enqueues.

        Every rank must call it with what `agree_ahead` has returned. Ranks do not talk on the
        host, which waits for nothing.
        """
        with recordable():
            compute()
            self._repeat(agreed)

    @collective("multi_node_mean_grad")
    def _repeat(self, agreed: Agreement) -> None:
        fill_missing_gradients(agreed.parameters)
        if self.topology.size == 1:
            return
        wire = self.wire_with(None)
        buckets = self._buckets[agreed.description, wire, ()]
        self.average(agreed.parameters, buckets, wire)
        self._recorded.append((buckets, *self._buffers.values()))

    def average(
        self, parameters: Sequence[chainer.Parameter], buckets: Sequence[Bucket], wire: Wire
    ) -> None:
        """Replace the gradients with their means, bucket by bucket. Collective."""
        flat = flat_gradients(parameters)
        for bucket in buckets:
            gradients = [flat[index] for index in bucket.members]
            size = size_of(gradients)
            with spans.span("gather gradients", details=size):
                bucket.gather(gradients)
            with spans.span("all-reduce", details=size):
                wait_for(bucket.exchange(self.collectives(bucket.on_gpu, wire)))
            with spans.span("hand back", details=size):
                bucket.scatter(gradients)

    def embeddings_of(self, model: chainer.Link) -> Set[VariableNode]:
        """Return the parameters for which only rows are sent: embeddings, on several hosts."""
        is_worth_it = self.topology.inter_size > 1 and self.algorithm.sends_rows
        return embeddings_of(model) if is_worth_it else frozenset()

    def collectives(self, on_gpu: bool, wire: Wire) -> Collectives:
        """Return the collectives of all ranks for buffers in this memory.

        The first all-reduce creates its reducers, which is collective and blocks. Later ones never
        block, so one thread can advance several in turn.
        """
        reducers = self._gpu if on_gpu else self._host
        # In GPU memory, the kernels cast when gathering.
        wire_dtype = None if on_gpu else wire.host
        return Collectives(self.algorithm, reducers, self._host.messages, wire_dtype)

    @collective("update")
    def set_up(self, on_gpu: bool) -> None:
        """Create the reducers that later all-reduces in this memory use. Collective."""
        # One element per rank.
        n, dtype = self.topology.size, np.dtype(np.float32)
        buffer = gpu_zeros(n, dtype) if on_gpu else np.zeros(n, dtype)
        wait_for(self.algorithm.average(buffer, self._gpu if on_gpu else self._host, 1, None))
        if on_gpu:
            the_gpu().record().Wait()  # the GPU uses the buffer until then

    def check_overflow(
        self,
        model: chainer.Link,
        buckets: Sequence[Bucket],
        exchanges: Sequence[GradientExchange],
    ) -> None:
        """Check that no gradient has overflowed in ``exchanges``. Collective.

        Only casts in host memory record overflows, so gradients in GPU memory are not checked.
        """
        if self.wire_with(None).host == FLOAT16 and not all(bucket.on_gpu for bucket in buckets):
            largest = max(each._host.take_overflow() for each in exchanges)
            check_overflow(self.mpi_comm, model, largest)

    @collective("update")
    def duplicate(self) -> Duplicate[GradientExchange]:
        """Return a duplicate that can run concurrently with this exchange. Collective."""

        def make(mpi_comm: MPI.Intracomm) -> GradientExchange:
            transports = GpuTransports(mpi_comm, is_cuda_aware=self._transports.is_cuda_aware)
            group = Group(mpi_comm)
            return GradientExchange(mpi_comm, self.topology, transports, self.algorithm, group)

        self.has_duplicates = True
        return Duplicate(self.mpi_comm, make, GradientExchange.free)

    def free(self) -> None:
        """Release the reducers and the transports. Collective."""
        self._gpu.free()
        self._host.free()
        self._transports.free()

    def _buckets_for(
        self,
        agreed: Agreement,
        wire: Wire,
        compressor: Compressor | None,
        model: chainer.Link,
    ) -> Sequence[Bucket]:
        known, most = self._buckets, _MOST_MODELS
        if compressor is not None:
            known, most = compressor.buckets, 1
        embeddings = self.embeddings_of(model)
        rows = tuple(index for index, p in enumerate(agreed.parameters) if p.node in embeddings)
        key = agreed.description, wire, rows
        if key not in known:
            if len(known) >= most:
                known.clear()
            if compressor is not None:
                compressor.name_parameters(model)
            limit = self.algorithm.bucket_bytes
            gpu_limit = 0 if limit == 0 else float("inf")
            if limit is None:
                one_host = self.topology.inter_size == 1
                limit = _BUCKET_BYTES_ON_ONE_HOST if one_host else _BUCKET_BYTES
            if compressor is not None and compressor.is_on:
                # Compressed gradients are so small that only the number of messages matters.
                limit = gpu_limit = float("inf")
            known[key] = make_buckets(
                agreed.parameters,
                Limits(limit, gpu_limit, float("inf")),
                wire,
                self.topology.size,
                buffers=self._buffers,
                compressor=compressor,
                embeddings=embeddings,
            )
        return known[key]
