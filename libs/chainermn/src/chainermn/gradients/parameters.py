"""Get a model's parameters in the same order on all ranks, or raise an error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import chainer
import numpy as np
from chainer.backends import cuda

from chainermn.agreement import (
    InputError,
    any_true,
    attempt,
    check_equal,
    pack,
    raise_errors_of,
    unpack,
)
from chainermn.channels_last import as_shaped, as_stored, is_channels_last, lay_out
from chainermn.gradients.step import Step
from chainermn.gradients.wire_dtype import why_not_on_gpu
from chainermn.transport.gpu.device import on_gpu, the_gpu
from chainermn.transport.reducer import Array

if TYPE_CHECKING:
    from chainer.variable import VariableNode
    from mpi4py import MPI


class Description(NamedTuple):
    """The properties of a parameter that ranks compare: everything except its values."""

    name: str
    shape: tuple[int, ...] | None  # None: not initialized
    dtype: np.dtype[Any] | None
    on_gpu: bool
    has_grad: bool
    channels_last: bool

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.name} (not initialized)"
        where = " in GPU memory" * self.on_gpu
        return f"{self.name} {np.dtype(self.dtype).name}{list(self.shape)}{where}"


def named_parameters(model: chainer.Link) -> list[tuple[str, chainer.Parameter]]:
    """Return the parameters of ``model`` with their names, sorted by name."""
    if not isinstance(model, chainer.Link):
        raise TypeError(f"expected a model, which is a chainer.Link, got {type(model)}")
    return sorted(model.namedparams(), key=itemgetter(0))


def initialized_parameters(model: chainer.Link) -> dict[VariableNode, chainer.Parameter]:
    """Return the initialized parameters by node, each once, in the order of the model."""
    return {parameter.node: parameter for parameter in model.params(include_uninit=False)}


def is_on_gpu(model: chainer.Link) -> bool:
    """Tell whether any parameter of ``model`` has its values in GPU memory."""
    return any(on_gpu(parameter.array) for parameter in model.params())


def is_all_on_gpu(model: chainer.Link) -> bool:
    """Tell whether all initialized parameters of ``model`` have their values in GPU memory."""
    return all(on_gpu(parameter.array) for parameter in model.params(include_uninit=False))


class Agreement(NamedTuple):
    """The gradients that all ranks exchange in a step; none if the step pauses."""

    step: Step
    parameters: Sequence[chainer.Parameter] = ()
    description: Hashable = None  # of all parameters; also tells which gradients are missing


class Proposal:
    """The gradients that this rank would exchange in a step. Ranks agree on them.

    Parameters
    ----------
    model : chainer.Link
        Model whose gradients to exchange.
    zero_fill : bool
        Whether to set missing gradients of initialized parameters to zeros.
    wire_dtype : dtype or None
        Dtype in which gradients in GPU memory are sent. None means their own dtype.
    step : Step
        What this rank tells the others.

    Attributes
    ----------
    packed : array of int64 of shape (n,)
        Replace these integers with their maxima over the ranks, then call `agreed`.
    """

    def __init__(
        self, model: chainer.Link, zero_fill: bool, wire_dtype: np.dtype[Any] | None, step: Step
    ) -> None:
        self._zero_fill = zero_fill
        self._pairs, own = _describe_all(model, assume_grad=zero_fill)
        reason = why_not_on_gpu(wire_dtype)
        if reason and not isinstance(own, InputError) and any(each.on_gpu for each in own):
            own = InputError(ValueError, reason)
        self._own, self._is_debug = own, chainer.is_debug()
        self._settings = (
            f"allreduce_grad_dtype={wire_dtype}, zero_fill={zero_fill}, debug={self._is_debug}"
        )
        self.packed = pack((self._settings, own), step.to_integers())

    def agreed(self, mpi_comm: MPI.Intracomm) -> Agreement:
        """Return the gradients that the ranks of ``mpi_comm`` have agreed on.

        Raises
        ------
        TypeError, ValueError
            If a rank does not give a model, or if parameters, missing gradients or settings
            differ between ranks. In Chainer's debug mode, also if a gradient is not finite. Every
            rank raises.
        """
        is_equal, maxima = unpack(self.packed)
        step, own = Step.of_all(maxima), self._own
        if step.pauses:
            return Agreement(step)
        if not is_equal or isinstance(own, InputError):
            check_equal(mpi_comm, self._settings, "multi_node_mean_grad")
            everywhere = _gather_descriptions(mpi_comm, own, "multi_node_mean_grad")
            own = self._own = self._laid_alike(everywhere)
        if self._is_debug:
            _check_finite(mpi_comm, self._pairs)
        parameters = self._parameters()
        if self._zero_fill:
            fill_missing_gradients(parameters)
        return Agreement(step, parameters, own)

    def agreed_ahead(self) -> Agreement:
        """Return the gradients that the ranks exchange after the next backward.

        There are none if the ranks differ, or have to settle something first.
        """
        is_equal, maxima = unpack(self.packed)
        step, own = Step.of_all(maxima), self._own
        is_open = step.pauses or step.has_begun or step.needs_plan or not is_equal
        if is_open or isinstance(own, InputError):
            return Agreement(step)
        return Agreement(step, self._parameters(), own)

    def _laid_alike(
        self, everywhere: Sequence[tuple[Description, ...]]
    ) -> tuple[Description, ...]:
        """Lay parameters channels last that lie so on any rank; return the new descriptions.

        Ranks without data have not run the convolutions that change the order.
        """
        found = []
        for (_, parameter), described in zip(
            self._pairs, zip(*everywhere, strict=True), strict=True
        ):
            is_last = any(each.channels_last for each in described)
            if is_last:
                lay_out(parameter)
            found.append(described[0]._replace(channels_last=is_last))
        return tuple(found)

    def _parameters(self) -> list[chainer.Parameter]:
        """Return the parameters whose gradients are exchanged, each once; no rank had an error."""
        described = zip(self._pairs, cast("tuple[Description, ...]", self._own), strict=True)
        given = [p for (_, p), each in described if each.shape is not None and each.has_grad]
        return list({parameter.node: parameter for parameter in given}.values())


def fill_missing_gradients(parameters: Iterable[chainer.Parameter]) -> None:
    """Set the missing gradients of initialized parameters to zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            # CuPy's, if the parameter is in GPU memory.
            parameter.grad = np.zeros_like(parameter.array)


def bcast_parameters(
    mpi_comm: MPI.Intracomm, transport_of: Callable[[Array], Any], model: chainer.Link
) -> None:
    """Broadcast each parameter from the lowest rank that has initialized it.

    ``transport_of`` returns the transport for the memory of an array.

    Raises
    ------
    TypeError, ValueError
        If a rank does not give a model, or if the ranks have different parameters. Every rank
        raises.
    """
    pairs, own = _describe_all(model, assume_grad=True)
    everywhere = _gather_descriptions(mpi_comm, own, "bcast_data", uninitialized_matches=True)
    for index, (_, parameter) in enumerate(pairs):
        described = [descriptions[index] for descriptions in everywhere]
        owner = next((r for r, d in enumerate(described) if d.shape is not None), None)
        if owner is None:
            continue
        source = described[owner]
        if parameter.array is None:
            parameter.initialize(source.shape)
        is_last = any(each.channels_last for each in described)
        stored = as_stored(parameter.array, is_last)
        values = _contiguous(stored, source)
        transport_of(values).bcast(values.reshape(-1), owner)
        if values is not stored:
            parameter.array = as_shaped(values, is_last)


def check_overflow(mpi_comm: MPI.Intracomm, model: chainer.Link, largest: float) -> None:
    """Check that no finite gradient has become infinite as float16. Collective.

    The gradients of ``model`` are already the means; ``largest`` is the largest magnitude that
    became infinite on this rank, or 0.

    Raises
    ------
    OverflowError
        If a gradient has become infinite on any rank. All ranks raise, unless loss scaling is on:
        then Chainer skips the step and lowers a dynamic scale.
    """
    if not any_true(mpi_comm, largest > 0):
        return
    pairs = named_parameters(model)
    is_scaled = any(parameter._loss_scale is not None for _, parameter in pairs)
    everywhere = mpi_comm.allgather((largest, is_scaled))
    if any(scaled for _, scaled in everywhere):
        return
    shown = ", ".join(
        f"{value:.3g} on rank {rank}" for rank, (value, _) in enumerate(everywhere) if value
    )
    raise OverflowError(
        "multi_node_mean_grad: gradients beyond 65504, the largest float16, have become infinite "
        f"on the wire: {', '.join(_not_finite(pairs))} (up to {shown}). Use "
        "allreduce_grad_dtype='bfloat16', which has the range of float32, or 'float32'; or scale "
        "the loss with optimizer.loss_scaling(), which skips such steps"
    )


def _contiguous(array: Any, like: Description) -> Any:
    """Return ``array`` as a C-contiguous, writable array of the dtype and memory of ``like``.

    Copies the array only if necessary.
    """
    if like.on_gpu:
        array = array if on_gpu(array) else the_gpu().upload(array)
        return array.astype(like.dtype, order="C", copy=False)
    return np.require(cuda.to_cpu(array) if on_gpu(array) else array, like.dtype, ["C", "W"])


def _describe_all(
    model: chainer.Link, *, assume_grad: bool
) -> tuple[list[tuple[str, chainer.Parameter]], tuple[Description, ...] | InputError]:
    """Return the named parameters, and their descriptions for the other ranks."""
    pairs = attempt(lambda: named_parameters(model))
    if isinstance(pairs, InputError):
        return [], pairs
    return pairs, tuple(_describe(*pair, assume_grad=assume_grad) for pair in pairs)


def _describe(name: str, parameter: chainer.Parameter, *, assume_grad: bool) -> Description:
    array = parameter.array
    if array is None:
        return Description(name, None, None, False, False, False)
    has_grad = assume_grad or parameter.grad is not None
    is_last = is_channels_last(array)
    return Description(name, array.shape, array.dtype, on_gpu(array), has_grad, is_last)


def _not_finite(pairs: list[tuple[str, chainer.Parameter]]) -> list[str]:
    """Return the names of the parameters whose gradients have NaN or infinite elements."""
    return [
        name
        for name, parameter in pairs
        if parameter.array is not None
        and parameter.grad is not None
        and not np.isfinite(parameter.grad).all()
    ]


def _check_finite(mpi_comm: MPI.Intracomm, pairs: list[tuple[str, chainer.Parameter]]) -> None:
    """Raise on every rank if a gradient is NaN or infinite on any rank."""
    everywhere = mpi_comm.allgather(_not_finite(pairs))
    if any(everywhere):
        shown = "; ".join(f"rank {rank}: {', '.join(n)}" for rank, n in enumerate(everywhere) if n)
        # Scripts look for the first sentence, which is all that the original said.
        raise ValueError(
            "Parameters diverged after allreduce. multi_node_mean_grad: gradients that are NaN or "
            f"infinite: {shown}. Look at the data there, lower the learning rate, or in float16 "
            "scale the loss with optimizer.loss_scaling()"
        )


def _gather_descriptions(
    mpi_comm: MPI.Intracomm,
    own: tuple[Description, ...] | InputError,
    where: str,
    *,
    uninitialized_matches: bool = False,
) -> list[tuple[Description, ...]]:
    """Return the descriptions of all ranks, or raise an error about the first difference.

    In memory, parameters may lie differently.
    """
    everywhere = mpi_comm.allgather(own)
    raise_errors_of(dict(enumerate(everywhere)), where)
    for described in zip_longest(*everywhere):
        present = [d for d in described if d is not None]
        compared = [
            d._replace(channels_last=False)
            for d in present
            if not (uninitialized_matches and d.shape is None)
        ] or present[:1]
        if len(present) == len(described) and len({d.name for d in described}) == 1:
            if len(set(compared)) == 1:
                continue
            if len({d[:4] for d in compared}) == 1:
                ranks = [rank for rank, d in enumerate(described) if not d.has_grad]
                raise ValueError(
                    f"{where}: parameter {compared[0].name} has no gradient on rank"
                    f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}, but has one on the "
                    "others. Use it in the loss of every rank, or pass zero_fill=True to treat "
                    "the missing gradient as zeros"
                )
        shown = "; ".join(
            f"rank {rank}: {d or 'no further parameter'}" for rank, d in enumerate(described)
        )
        raise ValueError(
            f"{where}: the model must have the same parameters on all ranks; "
            f"the first difference is {shown}"
        )
    return everywhere
