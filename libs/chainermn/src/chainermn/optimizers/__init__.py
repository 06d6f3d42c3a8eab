"""Optimizers that average gradients over the ranks before each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from chainermn.arguments import check_communicator, check_has, check_number
from chainermn.optimizers.double_buffering_optimizer import DoubleBufferingOptimizer
from chainermn.optimizers.gradient_clipping import GradientClipping
from chainermn.optimizers.local_sgd import LocalSGD, LocalSGDOptimizer
from chainermn.optimizers.multi_node_optimizer import MultiNodeOptimizer, Overlap
from chainermn.optimizers.overlapping_optimizer import OverlappingOptimizer

if TYPE_CHECKING:
    import chainer

    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.compression import Compression

__all__ = [
    "DoubleBufferingOptimizer",
    "GradientClipping",
    "LocalSGD",
    "LocalSGDOptimizer",
    "MultiNodeOptimizer",
    "create_multi_node_optimizer",
]

_WHERE = "create_multi_node_optimizer"


def create_multi_node_optimizer(
    actual_optimizer: chainer.Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    overlap: Overlap = "auto",
    compression: Compression | None = None,
    accumulate: int = 1,
    local: LocalSGD | None = None,
    uneven: bool = False,
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that its ``update`` takes a step on the mean of all ranks' gradients.

    Parameters
    ----------
    actual_optimizer : chainer.Optimizer
    communicator : CommunicatorBase
    double_buffering : bool
        Whether to exchange the gradients of one iteration while the next one computes its own.
        Each step is then one iteration late; see `DoubleBufferingOptimizer`.
    zero_fill : bool
        Whether to treat a missing gradient (``None``) as zeros. Otherwise a gradient that no rank
        has stays ``None``, and one that only some ranks have is an error on all ranks.
    overlap : bool or 'auto'
        Whether to exchange gradients while backward still computes others. The result is the same
        in all cases. The exchange runs in a thread. With Open MPI on several hosts, which only
        one thread may call at a time, the thread of the exchange has turns while backward is
        inside functions of Chainer. Without ``MPI_THREAD_SERIALIZED``, and in other functions, the
        exchange goes on between functions, which hides less. If you call ``loss.backward``
        yourself, call `MultiNodeOptimizer.backward` instead. ``'auto'`` tries overlap on several
        hosts: some of the first iterations overlap and some do not, and the faster way is kept.
        On one host overlap costs more than it hides, because the ranks leave no core for it.
        Gradients in GPU memory are exchanged on a separate stream, with ``True`` only. Double
        buffering already hides the exchange.
    compression : Compression, optional
        How to send gradients in fewer bytes: one of the classes in ``chainermn.compression``. The
        means are then approximate, but the same on all ranks. What they lack is sent later.
    accumulate : int
        Exchange gradients and take a step once in so many calls of ``update``, on the mean over
        the batches of all of them: a batch so many times as large. At the end of an epoch a step
        is taken on what there is. An update is still an iteration of a trainer.
    local : LocalSGD, optional
        Let each rank take steps on its own gradients, and average parameters now and then. A
        compression then compresses the changes of the parameters.
    uneven : bool
        Whether ranks may have different numbers of batches in an epoch. A rank that has ended it
        takes the steps of the others with them, without a gradient of its own: each mean is over
        the ranks that have one. It needs an updater that calls `new_epoch` of the optimizer at
        the end of an epoch, as ``chainer.training.StandardUpdater`` does, and extensions whose
        triggers count epochs, because ranks then have different numbers of iterations. An updater
        may have one such optimizer only.

    Returns
    -------
    MultiNodeOptimizer
        An optimizer to use in place of ``actual_optimizer``, with the same attributes, hooks and
        serialisation.

    Raises
    ------
    TypeError
        If ``actual_optimizer`` is not an optimizer, ``communicator`` not a communicator,
        ``compression`` not a compression, or ``double_buffering`` neither True nor False.
    ValueError
        If ``overlap`` has another value, or ``double_buffering`` is True together with
        ``overlap`` or with ``compression``; if the optimizer or the communicator cannot be used
        with this compression; if ``accumulate`` is not a positive integer; if ``local`` is given
        together with ``double_buffering``, ``overlap=True`` or ``accumulate``, or ``uneven`` is
        True together with any of these but ``overlap``, or without ``zero_fill``. If ranks give
        different settings, the first ``update`` raises on all of them.

    Notes
    -----
    The first ``update``, and each one after parameters were added or initialised, takes no step.
    Instead it gives all ranks the parameters of rank 0, because the gradients so far belong to
    different parameters on different ranks. After loading a snapshot that made all ranks equal,
    the first ``update`` does take its step, so a resumed run loses none.

    Hooks see the mean gradient, so ``WeightDecay`` and ``GradientClipping`` act as they do in one
    process with the batches of all ranks. So does dynamic loss scaling: an overflow on one rank
    makes the mean overflow, and all ranks skip the step.
    """
    call = f"{_WHERE}(actual_optimizer, communicator)"
    check_communicator(call, communicator, actual_optimizer)
    check_has(_WHERE, actual_optimizer, "an optimizer", "setup", "update")
    if double_buffering not in (True, False, None):
        raise TypeError(
            f"{_WHERE}: double_buffering must be True or False, got {double_buffering!r}. Give a "
            "compression as compression=..., a LocalSGD as local=..."
        )
    if overlap not in (True, False, "auto"):
        raise ValueError(f"overlap must be True, False or 'auto', got {overlap!r}")
    check_number("accumulate", accumulate, 1)
    compressor = None
    if compression is not None:
        expected = "a compression, such as chainermn.compression.PowerSGD(rank=4)"
        check_has(_WHERE, compression, expected, "check_optimizer", "compresses")
        compression.check_optimizer(actual_optimizer)
        compressor = communicator.create_compressor(compression)
    given = {
        "double_buffering": double_buffering,
        "overlap=True": overlap is True,
        "accumulate": accumulate > 1,
        "local": local is not None,
        "compression": compression is not None,
        "zero_fill=False": not zero_fill,
    }
    if uneven:
        why = "uneven=True lets ranks take part without a gradient"
        excluded = "double_buffering", "accumulate", "local", "compression", "zero_fill=False"
        _leave_out(why, given, *excluded)
    if local is not None:
        check_has(_WHERE, local, "a chainermn.optimizers.LocalSGD(period=8)", "period", "states")
        why = f"{local} exchanges nothing in most steps"
        _leave_out(why, given, "double_buffering", "overlap=True", "accumulate")
        return LocalSGDOptimizer(actual_optimizer, communicator, zero_fill, local, compressor)
    if double_buffering:
        if compression is not None:
            raise ValueError(
                "double_buffering=True and a compression exclude each other: a snapshot could not "
                "tell what has been sent. Choose overlap=True and the compression"
            )
        if overlap is True:
            raise ValueError(
                "double_buffering=True and overlap=True exclude each other: double buffering "
                "exchanges gradients during the whole next iteration. Choose one of them"
            )
        return DoubleBufferingOptimizer(
            actual_optimizer, communicator, zero_fill, accumulate=accumulate
        )
    may_pay = communicator.inter_size > 1
    kind = OverlappingOptimizer if overlap is True or (overlap and may_pay) else MultiNodeOptimizer
    return kind(actual_optimizer, communicator, zero_fill, overlap, compressor, accumulate, uneven)


def _leave_out(why: str, given: Mapping[str, object], *excluded: str) -> None:
    """Raise ValueError if any of the excluded arguments is given."""
    if found := [argument for argument in excluded if given[argument]]:
        raise ValueError(f"{why}: leave out {' and '.join(found)}")
