"""The optimizer that exchanges gradients between backward and update."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias

import chainer

from chainermn import spans
from chainermn.agreement import check_equal
from chainermn.gradients.parameters import initialized_parameters, named_parameters
from chainermn.optimizers import replicas, unsent
from chainermn.optimizers.accumulated import Accumulated, AccumulatedGradients
from chainermn.optimizers.attendance import Attendance
from chainermn.optimizers.replicas import Replicas
from chainermn.optimizers.unsent import Unsent
from chainermn.resuming import N_RANKS

if TYPE_CHECKING:
    from chainermn.communicators.communicator_base import CommunicatorBase
    from chainermn.compression.compression import Compression
    from chainermn.gradients.compressor import Compressor

# Key in snapshots.
_UNSENT = "unsent"

Overlap: TypeAlias = bool | Literal["auto"]


class MultiNodeOptimizer:
    """The optimizer that `create_multi_node_optimizer` returns.

    All other attributes are those of ``actual_optimizer``.

    Attributes
    ----------
    actual_optimizer : chainer.Optimizer
        Optimizer that takes the steps.
    communicator : CommunicatorBase
        Communicator of the ranks that train the model.
    zero_fill : bool
        Whether missing gradients are treated as zeros.

    Examples
    --------
    In your own training loop, call ``update`` with the function that computes the loss:

    >>> x, t = np.ones((4, 2), np.float32), np.zeros(4, np.int32)
    >>> optimizer.update(model, x, t)  # gives all ranks the parameters of rank 0
    >>> optimizer.update(model, x, t)  # averages gradients and takes a step
    >>> optimizer.t
    1
    """

    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    zero_fill: bool
    _overlap: Overlap
    _compressor: Compressor | None
    _accumulate: int
    _attendance: Attendance | None
    _replicas: Replicas
    _accumulated: Accumulated
    #: Gradients that other ranks still have to send, by rank, for a snapshot of all ranks.
    unsent_elsewhere: Mapping[int, Unsent] = {}
    # Number of updates since gradients were averaged.
    _n_updates = 0
    _restored: Unsent | None = None

    def __init__(
        self,
        actual_optimizer: chainer.Optimizer,
        communicator: CommunicatorBase,
        zero_fill: bool,
        overlap: Overlap = False,
        compressor: Compressor | None = None,
        accumulate: int = 1,
        uneven: bool = False,
    ) -> None:
        vars(self).update(
            actual_optimizer=actual_optimizer,
            communicator=communicator,
            zero_fill=zero_fill,
            _overlap=overlap,
            _compressor=compressor,
            _accumulate=accumulate,
            _attendance=Attendance(communicator) if uneven else None,
            _replicas=Replicas(),
            _accumulated=AccumulatedGradients(),
        )

    @property
    def compression(self) -> Compression | None:
        """The compression of gradients; None if they are not compressed."""
        return None if self._compressor is None else self._compressor.compression

    def setup(self, link: chainer.Link) -> Self:
        """Set the model whose parameters are optimized, and return this optimizer."""
        self.actual_optimizer.setup(link)
        self._replicas.forget()
        self._n_updates = 0
        self._accumulated.load(None)
        if self._compressor is not None:
            self._compressor.load(0, {})
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Average the gradients of all ranks and take a step. Every rank must call it.

        With ``accumulate=k``, every ``k``-th call does this, and `new_epoch`.

        Parameters
        ----------
        lossfun : callable, optional
            Function that returns the loss, called as ``lossfun(*args, **kwds)``; then backward
            runs. By default, the gradients that the parameters already have are used.

        Raises
        ------
        ValueError
            On every rank, if the ranks have different parameters or settings; without
            ``zero_fill``, also if only some ranks have a gradient. With ``accumulate``, if
            ``lossfun`` is not given.
        """
        self._accumulated.take_over(self.actual_optimizer)
        if lossfun is not None:
            self._backward(lossfun, *args, **kwds)
        elif self._accumulate > 1:
            raise ValueError(
                f"accumulate={self._accumulate} needs update(lossfun, ...), as "
                "chainer.training.StandardUpdater calls it. In your own training loop, call "
                "loss.backward() several times before update()"
            )
        self._n_updates += 1
        is_first = not self._replicas.were_equal(self.actual_optimizer.target)
        if self._n_updates >= self._accumulate or is_first:
            self._update_all()

    def _update_all(self, *, ends_epoch: bool = False) -> None:
        """Average the gradients and take a step. Collective."""
        target = self.actual_optimizer.target
        n_updates, self._n_updates = self._n_updates, 0
        restored_here, self._restored = self._restored, None
        self._complete_loss_scales()
        changed, restored, partial, ends_epoch, news = self._step_unless(
            self._replicas.has_other_parameters(target),
            restored_here is not None,
            n_updates < self._accumulate,
            ends_epoch,
            self._attendance is not None and self._attendance.has_news,
        )
        if not (changed or restored or partial or ends_epoch or news):
            return
        if changed:
            self._agree_on_settings()
        if restored and not self._after_restoring(restored_here) and self._accumulate > 1:
            target.cleargrads()
            n_updates, partial, ends_epoch = 0, True, False
        if changed and not (restored and self._are_replicas_equal()):
            self._synchronize()
            return
        self._replicas.note_equal(target)
        if ends_epoch:
            self._weigh_all_the_same(n_updates)
            if n_updates == 0:
                return
        elif partial:
            self._n_updates = n_updates
            return
        if self._attendance is not None and news and self._attendance.agree():
            return
        self._step_unless()

    def new_epoch(self, auto: bool = False) -> None:
        """Finish an epoch. Updaters call this; every rank must call it.

        With ``accumulate``, take a step on the mean of the batches since the last step. With
        ``uneven``, join the steps of the ranks that still have batches.
        """
        if self._accumulate > 1 and self._replicas.were_equal(self.actual_optimizer.target):
            self._update_all(ends_epoch=True)
        if self._attendance is not None:
            self._attendance.leave()
            while self._attendance.is_absent:
                self.actual_optimizer.target.cleargrads()
                self._n_updates = 1
                self._update_all()
        self.actual_optimizer.new_epoch(auto)

    def _complete_loss_scales(self) -> None:
        """Give parameters without a gradient the loss scale that other ranks may have for it."""
        scale = self.actual_optimizer._loss_scale
        if scale is None:
            return
        parameters = initialized_parameters(self.actual_optimizer.target).values()
        scales = [p._loss_scale for p in parameters if p.grad is not None]
        for parameter in parameters:
            if parameter.grad is None:
                parameter._loss_scale = scales[0] if scales else scale

    def _weigh_all_the_same(self, n_updates: int) -> None:
        """Turn gradients of fewer batches than usual into their mean. Collective."""
        self._check_equal_counts(
            n_updates,
            f"accumulate={self._accumulate}: an epoch ends with different numbers of batches to "
            "average",
        )
        for parameter in initialized_parameters(self.actual_optimizer.target).values():
            if parameter.grad is not None and n_updates:
                # Gradients may share an array, or be read-only.
                parameter.grad = parameter.grad * (self._accumulate / n_updates)

    def _check_equal_counts(self, n_updates: int, problem: str) -> None:
        """Raise on all ranks unless all have made the same number of updates."""
        counts = self.communicator.allgather_obj(n_updates)
        if len(set(counts)) > 1:
            shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            raise ValueError(
                f"{problem}: {shown}. Give all ranks the same number of examples, as "
                "scatter_dataset does with force_equal_length=True"
            )

    def _backward(self, lossfun: Callable[..., Any], *args: Any, **kwds: Any) -> None:
        actual = self.actual_optimizer
        with spans.span("forward"):
            loss = lossfun(*args, **kwds)
        if self._n_updates == 0 or self._accumulate == 1:
            if getattr(actual, "_use_cleargrads", True):
                actual.target.cleargrads()
            else:
                actual.target.zerograds()
        with spans.span("backward"):
            self._backward_of(loss)

    def _backward_of(self, loss: chainer.Variable) -> None:
        actual = self.actual_optimizer
        if self._accumulate == 1:
            self.backward(loss)
            return
        scale = actual._loss_scale
        with chainer.using_device(loss.device):
            # The sum over all batches is then their mean.
            seed = (1 if scale is None else scale) / self._accumulate
            loss.grad = loss.device.xp.full_like(loss.array, seed)
        if self._n_updates == self._accumulate - 1:
            self.backward(loss)
        else:
            loss.backward(loss_scale=scale)

    def backward(self, loss: chainer.Variable) -> None:
        """Run ``loss.backward()`` with the loss scale of this optimizer; call `update()` next.

        Use it in your own training loop, for ``overlap``: the exchange of gradients then starts
        during backward. After a plain ``loss.backward()`` it starts in `update`. To accumulate
        gradients over several batches, use ``loss.backward()`` for all except the last::

            model.cleargrads()
            for batch in batches[:-1]:
                loss(model, batch).backward()
            optimizer.backward(loss(model, batches[-1]))
            optimizer.update()

        Do not change the gradients between this call and `update`. Replacing them costs a second
        exchange.

        Parameters
        ----------
        loss : chainer.Variable
            Loss with one element.
        """
        loss.backward(loss_scale=self.actual_optimizer._loss_scale)

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the state of ``actual_optimizer``, and gradients that are still unsent.

        The number of ranks is saved too, but loading does not read it.
        """
        self.actual_optimizer.serialize(serializer)
        comm = self.communicator
        if not isinstance(serializer, chainer.Deserializer):
            serializer(N_RANKS, comm.size)
            if self.has_unsent:
                of_ranks = {comm.rank: self.unsent(), **self.unsent_elsewhere}
                unsent.save(serializer[_UNSENT], comm.size, of_ranks)
            return
        names = [name for name, _ in named_parameters(self.actual_optimizer.target)]
        keys = self._accumulated.keys if self.has_unsent else ()
        if self._compressor is not None:
            keys += self._compressor.keys
        restored = self._restored = unsent.load(
            *(serializer[_UNSENT], comm.size, comm.rank, names, keys),
            is_compressed=self._compressor is not None,
        )
        self._n_updates = restored.n_updates
        self._accumulated.load(restored.arrays if restored.n_updates else None)
        if self._compressor is not None:
            self._compressor.load(restored.n_exchanges, restored.arrays)

    @property
    def has_unsent(self) -> bool:
        """Whether the settings may leave something to send later."""
        return self._compressor is not None or self._accumulate > 1

    def unsent(self) -> Unsent:
        """Return the gradients that this rank still has to send."""
        compressor = self._compressor
        arrays: dict[str, dict[str, Any]] = {}
        if compressor is not None:
            arrays = {name: dict(of_name) for name, of_name in compressor.state().items()}
        if self._n_updates:
            for name, of_name in self._accumulated.state(self.actual_optimizer).items():
                arrays.setdefault(name, {}).update(of_name)
        n_exchanges = 0 if compressor is None else compressor.n_exchanges
        return Unsent(n_exchanges, self._n_updates, arrays)

    def settle(self) -> None:
        """Make parameters equal on all ranks, for an evaluation or a snapshot. Collective."""

    def _step_unless(self, *flags: bool) -> Sequence[bool]:
        """Average gradients and step, unless a flag is true on any rank; return which are."""
        found = self._mean_unless(flags)
        if not any(found):
            if self._attendance is not None and self._attendance.weight != 1:
                for parameter in initialized_parameters(self.actual_optimizer.target).values():
                    parameter.grad *= self._attendance.weight
            self._take_step()
        return found

    @spans.spanned("optimizer")
    def _take_step(self) -> None:
        self.actual_optimizer.update(None)

    def _mean_unless(self, flags: Sequence[bool]) -> Sequence[bool]:
        target = self.actual_optimizer.target
        if self._compressor is None:
            # Users' communicators may lack this parameter.
            return self.communicator.mean_grad_unless(flags, target, self.zero_fill)
        return self.communicator.mean_grad_unless(flags, target, self.zero_fill, self._compressor)

    def _agree_on_settings(self) -> None:
        """Raise on all ranks unless their optimizers have the same settings."""
        check_equal(self.communicator, self._settings(), "create_multi_node_optimizer")
        if self.compression is not None:
            self._check_arithmetic(self.compression)

    def _check_arithmetic(self, compression: Compression) -> None:
        """Raise on all ranks unless their processors would compute the same means."""
        everywhere = self.communicator.allgather_obj(compression.arithmetic())
        others = [rank for rank, one in enumerate(everywhere) if one != everywhere[0]]
        if others:
            raise ValueError(
                f"{compression}: rank 0 and rank{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others))} have processors for which BLAS rounds "
                "differently, so the means would differ. Set OPENBLAS_CORETYPE=Haswell on all "
                "hosts, or use another compression, such as chainermn.compression.TopK"
            )

    def _settings(self) -> str:
        settings = f"double_buffering=False, overlap={self._overlap!r}"
        return settings + self._further_settings()

    def _further_settings(self) -> str:
        settings = f", compression={self.compression!r}" * (self._compressor is not None)
        settings += f", accumulate={self._accumulate}" * (self._accumulate > 1)
        return settings + ", uneven=True" * (self._attendance is not None)

    def _after_restoring(self, restored: Unsent | None) -> bool:
        """Agree on how to continue after at least one rank has loaded a snapshot.

        Returns whether all ranks continue with their unsent gradients. Otherwise they drop these.
        """
        if restored is None:
            reason = "a rank has loaded no snapshot" if self.has_unsent else ""
            restored = Unsent(reason=reason)
        found = restored.reason, restored.n_exchanges, restored.n_updates
        everywhere = self.communicator.allgather_obj(found)
        reasons = [reason for reason, *_ in everywhere if reason]
        if not reasons and (not self.has_unsent or len(set(everywhere)) == 1):
            return True
        self._forget(everywhere[0][1])
        if self.communicator.rank == 0:
            reason = next(iter(reasons), "the ranks have loaded different snapshots")
            warnings.warn(
                f"what was still to be sent when the snapshot was written is lost: {reason}",
                stacklevel=4,
            )
        return False

    def _forget(self, n_exchanges: int) -> None:
        """Drop unsent gradients, because they do not fit those of other ranks."""
        if self._compressor is not None:
            self._compressor.load(n_exchanges, {})

    def _are_replicas_equal(self) -> bool:
        arrays = replicas.arrays_of(self.actual_optimizer.target)
        return replicas.are_equal(self.communicator, arrays)

    def _synchronize(self) -> None:
        """Make the replicas equal. Subclasses drop gradients of the old ones. Collective."""
        target = self.actual_optimizer.target
        replicas.make_equal(self.communicator, target)
        self._replicas.note_equal(target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __copy__(self) -> Self:
        return self._around(self.actual_optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._around(copy.deepcopy(self.actual_optimizer, memo))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, because its communicator belongs to this "
            "process. Pickle its actual_optimizer, or save it with chainer.serializers"
        )

    def _twin(self, actual_optimizer: chainer.Optimizer, compressor: Compressor | None) -> Self:
        settings = self.zero_fill, self._overlap, compressor, self._accumulate
        is_uneven = self._attendance is not None
        return type(self)(actual_optimizer, self.communicator, *settings, is_uneven)

    def _around(self, actual_optimizer: chainer.Optimizer) -> Self:
        """Return a wrapper like this one around a copy of its optimizer."""
        compressor = None if self._compressor is None else self._compressor.copy()
        twin = self._twin(actual_optimizer, compressor)
        # Accumulated gradients and local steps are not copied: with them, the copy starts over.
        is_settled = self._n_updates == 0
        if is_settled and not self._replicas.has_other_parameters(self.actual_optimizer.target):
            twin._replicas.note_equal(actual_optimizer.target)
        return twin


def sending_later(target: Any) -> list[MultiNodeOptimizer]:
    """Return the optimizers with unsent gradients: of a trainer or an updater, or ``target``."""
    updater = getattr(target, "updater", target)
    optimizers = getattr(updater, "get_all_optimizers", lambda: {"": updater})()
    return [
        optimizer
        for _, optimizer in sorted(optimizers.items())
        if isinstance(optimizer, MultiNodeOptimizer) and optimizer.has_unsent
    ]
