"""Optimizers that average gradients over the ranks before each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from chainermn.arguments import check_communicator, check_has, check_number
from chainermn.gradients.compressor import Compressor
from chainermn.optimizers.comparison import Comparison, OnDifference
from chainermn.optimizers.double_buffering_optimizer import DoubleBufferingOptimizer
from chainermn.optimizers.exchanges import library_exchange
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
    compare_every: int = 1,
    on_difference: OnDifference = "raise",
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that each step uses the mean of the gradients of all ranks.

    Parameters
    ----------
    actual_optimizer : chainer.Optimizer
        Optimizer that takes the steps.
    communicator : CommunicatorBase
        Communicator of the ranks that train the model.
    double_buffering : bool
        Whether to exchange the gradients of one iteration while the next iteration computes its
        own. Each step then uses gradients that are one iteration old; see
        `DoubleBufferingOptimizer`.
    zero_fill : bool
        Whether to treat missing gradients (``None``) as zeros. Otherwise, a gradient that no rank
        has stays ``None``, and one that only some ranks have is an error on all ranks.
    overlap : bool or 'auto'
        Whether to exchange gradients while backward still computes others. This does not change
        the result. ``'auto'`` tries it on several hosts: some of the first iterations overlap and
        some do not, then the faster way is kept. On one host, overlap costs more time than it
        saves, because no core is free for it. Gradients in GPU memory need ``True``; they are
        exchanged on a separate stream. If you call ``loss.backward`` yourself, call
        `MultiNodeOptimizer.backward` instead.
    compression : Compression, optional
        Algorithm that sends gradients in fewer bytes: an object of a class in
        ``chainermn.compression``. Means are then approximate, but the same on all ranks. The
        error is sent later.
    accumulate : int
        Number of calls of ``update`` per step (gradient accumulation). The step uses the mean over
        all their batches, as if the batch were that many times as large. At the end of an epoch, a
        step uses the batches since the last step. An iteration of a trainer is still one update.
    local : LocalSGD, optional
        Settings of local SGD: each rank takes several steps on its own gradients, then the
        parameters of all ranks are averaged. A compression then compresses the changes of the
        parameters.
    uneven : bool
        Whether ranks may have different numbers of batches in an epoch. A rank that has finished
        the epoch joins the steps of the others without a gradient, and each mean is over the
        ranks that have one. Use an updater that calls `new_epoch` of the optimizer, as
        ``chainer.training.StandardUpdater`` does, with only one such optimizer. Triggers of
        extensions must count epochs, because ranks have different numbers of iterations.
    compare_every : int
        Number of epochs after which the replicas of all ranks are compared, bit for bit. They
        are also compared at each evaluation by `create_multi_node_evaluator` or
        `GenericMultiNodeEvaluator`, and at each snapshot that all ranks write together. ``0``
        turns all of this off. See `MultiNodeOptimizer.compare_replicas`.
    on_difference : {'raise', 'warn', 'ignore'}
        What to do if replicas differ: raise on all ranks, or warn on rank 0. ``'ignore'`` compares
        nothing. Differences so small that they may be rounding are one warning at most.

    Returns
    -------
    MultiNodeOptimizer
        Optimizer to use instead of ``actual_optimizer``, with the same attributes, hooks and
        serialization.

    Raises
    ------
    TypeError
        If ``actual_optimizer`` is not an optimizer, or is one that this function has returned,
        ``communicator`` is not a communicator, ``compression`` is not a compression, or
        ``double_buffering`` is neither True nor False.
    ValueError
        If an argument has an invalid value, if the optimizer or the communicator does not support
        the compression, or if arguments exclude each other: ``double_buffering`` and ``local``
        both exclude ``overlap=True``; ``double_buffering`` excludes ``compression`` and
        ``local``; ``local`` excludes ``accumulate``; ``uneven`` excludes all of them except
        ``overlap``, and needs ``zero_fill``. If ranks pass different settings, the first
        ``update`` raises on all ranks.

    Notes
    -----
    The first ``update`` takes no step. Instead, it makes the replicas equal: all ranks get the
    parameters, persistent values, hyperparameters, loss scale and state of the optimizer that
    rank 0 has, so it is enough to load weights or a snapshot there. The first ``update`` after
    parameters were added or initialized takes no step either, and gives all ranks the parameters
    of rank 0. After all ranks have loaded a snapshot that made them equal, the first ``update``
    does take its step, so a resumed run loses none.

    Later, hyperparameters, Chainer's hooks, the loss scale and frozen parameters must be the same
    on all ranks: an ``update`` raises on all ranks if one has others. A hook of your own may be on
    one rank only if it changes nothing. What hooks and update rules draw, such as the noise of
    ``GradientNoise``, is the same on all ranks, whatever their seeds.

    Hooks see the mean gradient. So ``WeightDecay`` and ``GradientClipping`` have the same effect
    as in one process with the batches of all ranks. The same is true for dynamic loss scaling: an
    overflow on one rank makes the mean overflow, and all ranks skip the step.

    Overlap uses a thread. With Open MPI on several hosts, only one thread may call MPI at a time,
    so the exchange takes turns while backward is inside Chainer's functions. In other functions,
    or without ``MPI_THREAD_SERIALIZED``, it continues only between functions, which hides less
    of it.

    Examples
    --------
    >>> optimizer = chainer.optimizers.MomentumSGD(lr=0.1 * comm.size)
    >>> optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, accumulate=2)
    >>> optimizer = optimizer.setup(model)
    >>> optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    >>> optimizer.lr
    0.2
    """
    call = f"{_WHERE}(actual_optimizer, communicator)"
    check_communicator(call, communicator, actual_optimizer)
    check_has(_WHERE, actual_optimizer, "an optimizer", "setup", "update")
    if isinstance(actual_optimizer, MultiNodeOptimizer):
        raise TypeError(f"{_WHERE}: this optimizer averages gradients already; wrap it once")
    if double_buffering not in (True, False, None):
        raise TypeError(
            f"{_WHERE}: double_buffering must be True or False, got {double_buffering!r}. Pass a "
            "compression as compression=..., a LocalSGD as local=..."
        )
    if overlap not in (True, False, "auto"):
        raise ValueError(f"overlap must be True, False or 'auto', got {overlap!r}")
    check_number("accumulate", accumulate, 1)
    check_number("compare_every", compare_every, 0)
    if on_difference not in get_args(OnDifference):
        raise ValueError(
            f"on_difference must be 'raise', 'warn' or 'ignore', got {on_difference!r}"
        )
    exchange = library_exchange(communicator)
    if exchange is not None and not exchange.algorithm.exchanges:
        compare_every = 0
    comparison = Comparison(communicator, compare_every, on_difference)
    compressor = None
    if compression is not None:
        expected = "a compression, such as chainermn.compression.PowerSGD(rank=4)"
        check_has(_WHERE, compression, expected, "check_optimizer", "compresses")
        compression.check_optimizer(actual_optimizer)
        if library_exchange(communicator) is None:
            raise ValueError(
                f"{type(communicator).__name__} does not compress gradients; communicators of "
                "chainermn.create_communicator do"
            )
        compressor = Compressor(compression)
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
        return LocalSGDOptimizer(
            actual_optimizer, communicator, zero_fill, local, compressor, comparison
        )
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
            actual_optimizer,
            communicator,
            zero_fill,
            accumulate=accumulate,
            comparison=comparison,
        )
    may_pay = communicator.inter_size > 1
    kind = OverlappingOptimizer if overlap is True or (overlap and may_pay) else MultiNodeOptimizer
    return kind(
        actual_optimizer,
        communicator,
        zero_fill,
        overlap=overlap,
        compressor=compressor,
        accumulate=accumulate,
        uneven=uneven,
        comparison=comparison,
    )


def _leave_out(why: str, given: Mapping[str, object], *excluded: str) -> None:
    """Raise ValueError if any of the excluded arguments is given."""
    if wrong := [argument for argument in excluded if given[argument]]:
        raise ValueError(f"{why}: leave out {' and '.join(wrong)}")
